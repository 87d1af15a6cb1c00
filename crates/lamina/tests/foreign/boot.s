# A boot sector that reports, on the first serial port, every disk that the BIOS can read: for each disk the text at the
# beginning of its second sector. It is the first sector of the disk that the machine boots from. The tests assemble it.
#
# Output: "guest: N TEXT" for each disk N, then "guest: done".
    .code16
    .globl _start
_start:
    ljmp $0, $begin
begin:
    xorw %ax, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movw $0x7c00, %sp
    movb $0x80, drive
next:
    movb drive, %dl
    movb $0x42, %ah
    movw $packet, %si
    int $0x13
    jc done
    movw $prefix, %si
    call print
    movb drive, %al
    subb $0x50, %al          # 0x80 becomes '0'
    call put
    movb $' ', %al
    call put
    movw $buffer, %si
    call print
    movw $line, %si
    call print
    incb drive
    cmpb $0x90, drive
    jne next
done:
    movw $end, %si
    call print
halt:
    hlt
    jmp halt

print:
    lodsb
    testb %al, %al
    jz 1f
    call put
    jmp print
1:  ret

put:
    pushw %dx
    pushw %ax
    movw $0x3fd, %dx
2:  inb %dx, %al
    testb $0x20, %al
    jz 2b
    popw %ax
    movw $0x3f8, %dx
    outb %al, %dx
    popw %dx
    ret

    .equ buffer, 0x8000
drive:
    .byte 0x80
prefix:
    .asciz "guest: "
line:
    .asciz "\r\n"
end:
    .asciz "guest: done\r\n"
    .balign 4
# Disk address packet: one sector, second sector of the disk.
packet:
    .byte 16, 0
    .word 1
    .word buffer, 0
    .quad 1

    .org 510
    .word 0xaa55
