// workload MIB [KIB [MILLISECONDS]]: fills MIB MiB of memory, then prints a tick every MILLISECONDS (by default 100),
// and changes KIB KiB of the memory at each tick. At SIGUSR1 the program checks the content of the memory.
//
// The first word of a page counts the changes of the page. Every other word is a hash of the numbers of page and word.
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { PAGE = 4096, WORDS = PAGE / 8 };

static volatile sig_atomic_t check_wanted;

static void want_check(int signal) {
    (void)signal;
    check_wanted = 1;
}

static uint64_t hash(uint64_t page, uint64_t word) {
    uint64_t x = page * 0x9e3779b97f4a7c15u + word + 1;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return x ^ x >> 32;
}

int main(int count, char **arguments) {
    size_t mib = count > 1 ? strtoul(arguments[1], NULL, 10) : 0;
    size_t kib = count > 2 ? strtoul(arguments[2], NULL, 10) : 0;
    long period = count > 3 ? strtol(arguments[3], NULL, 10) : 100;
    size_t pages = mib << 8, each = kib / 4, next = 0;
    uint64_t *memory = NULL;
    if (pages) {
        memory = mmap(NULL, mib << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            puts("workload: no memory");
            return 1;
        }
        for (size_t page = 0; page < pages; page++)
            for (size_t word = 1; word < WORDS; word++) memory[page * WORDS + word] = hash(page, word);
    }
    struct sigaction action = {.sa_handler = want_check};
    sigaction(SIGUSR1, &action, NULL);
    printf("workload: %zu MiB\n", mib);
    fflush(stdout);
    for (unsigned long tick = 0;; tick++) {
        for (size_t i = 0; i < each && pages; i++, next = (next + 1) % pages) memory[next * WORDS]++;
        if (check_wanted) {
            check_wanted = 0;
            size_t wrong = 0;
            for (size_t page = 0; page < pages; page++)
                for (size_t word = 1; word < WORDS; word += 51) wrong += memory[page * WORDS + word] != hash(page, word);
            printf("workload: %s\n", wrong ? "WRONG" : "memory as it must be");
        }
        printf("tick %lu\n", tick);
        fflush(stdout);
        struct timespec wait = {period / 1000, period % 1000 * 1000000};
        nanosleep(&wait, NULL);
    }
}
