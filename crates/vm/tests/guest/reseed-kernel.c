// reseed-kernel: adds standard input to the entropy of the kernel's random number generator, and reseeds the generator.
#include <fcntl.h>
#include <linux/random.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

int main(void) {
    struct {
        int bits, bytes;
        unsigned char data[512];
    } pool;
    ssize_t length = 0, part;
    while ((part = read(0, pool.data + length, sizeof pool.data - length)) > 0) length += part;
    int device = open("/dev/urandom", O_WRONLY);
    pool.bits = (int)length * 8;
    pool.bytes = (int)length;
    if (length == 0 || device < 0 || ioctl(device, RNDADDENTROPY, &pool) != 0 || ioctl(device, RNDRESEEDCRNG) != 0) {
        perror("reseed-kernel");
        return 1;
    }
    return 0;
}
