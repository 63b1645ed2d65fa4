# ___chkstk_ms, which clang calls where a function begins that has more than a page of locals: it touches each page of the
# next %rax bytes of the stack, from the top, for Windows adds pages one by one. It keeps all registers. With zig's one,
# a module would have all of zig's library.
.globl ___chkstk_ms
___chkstk_ms:
    pushq %rcx
    pushq %rax
    leaq 24(%rsp), %rcx # the caller's stack
    jmp 2f
1:  subq $0x1000, %rcx
    orq $0, (%rcx)
    subq $0x1000, %rax
2:  cmpq $0x1000, %rax
    ja 1b
    subq %rax, %rcx
    orq $0, (%rcx)
    popq %rax
    popq %rcx
    retq
