// Threads that take turns on one thread of the system.
#pragma once

#include <cstddef>

namespace emulation {

// Where something has stopped.
struct Context {
    void *stack_pointer = nullptr;
};

// Goes on at `to`; returns when something goes on at `from`.
void switch_to(Context &from, Context &to);

class Fiber {
  public:
    // From its beginning, whatever it was doing. `body` must not return.
    void start(void (*body)());

    Context context;

  private:
    unsigned char *stack = nullptr;
};

// The stacks of all fibers, one behind the other.
extern unsigned char *stacks;
extern size_t bytes_of_stacks;

// Whether an address is on the stack of a fiber. Asked at each access.
inline bool on_a_stack(const void *address) {
    return static_cast<size_t>(static_cast<const unsigned char *>(address) - stacks) < bytes_of_stacks;
}

} // namespace emulation
