// Switching between stacks: the registers that a call preserves, and the stack's pointer. The system's own swapcontext
// asks the kernel for the signal mask at every turn, which would be most of a test's time.

#include "fiber.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

// void emulation_switch(void **from, void *to)
#if defined(__x86_64__)
asm(R"(
    .text
    .globl emulation_switch
    .type emulation_switch, @function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    retq
    .size emulation_switch, .-emulation_switch
)");
// Registers below the address that the switch returns to.
constexpr size_t SAVED = 6;
constexpr size_t RETURN_AT = 6;
#elif defined(__aarch64__)
asm(R"(
    .text
    .globl emulation_switch
    .type emulation_switch, %function
emulation_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size emulation_switch, .-emulation_switch
)");
constexpr size_t SAVED = 20;
constexpr size_t RETURN_AT = 11;
#else
#error "write emulation_switch for this processor"
#endif

extern "C" void emulation_switch(void **from, void *to);

namespace emulation {

namespace {

// Arrays that the compiler keeps in a device's registers lie here.
constexpr size_t STACK = 64 * 1024;
constexpr size_t STACKS = 1024;

} // namespace

unsigned char *stacks;
size_t bytes_of_stacks;

void switch_to(Context &from, Context &to) {
    emulation_switch(&from.stack_pointer, to.stack_pointer);
}

void Fiber::start(void (*body)()) {
    if (stack == nullptr) {
        if (stacks == nullptr) {
            void *const mapped = mmap(nullptr, STACKS * STACK, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (mapped == MAP_FAILED) {
                std::perror("emulation: no memory for stacks");
                std::abort();
            }
            stacks = static_cast<unsigned char *>(mapped);
        }
        if (bytes_of_stacks == STACKS * STACK) {
            std::fputs("emulation: too many fibers\n", stderr);
            std::abort();
        }
        stack = stacks + bytes_of_stacks;
        bytes_of_stacks += STACK;
    }
    // As if `body` had been called: the stack's end is at a multiple of 16, less the address to return to.
    void **const end = reinterpret_cast<void **>(stack + STACK);
    void **top = end - 2 - SAVED;
    for (void **slot = top; slot < end; slot++) {
        *slot = nullptr;
    }
    top[RETURN_AT] = reinterpret_cast<void *>(body);
    context.stack_pointer = top;
}

} // namespace emulation
