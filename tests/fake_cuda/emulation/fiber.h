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

// Whether an address is on the stack of a fiber.
bool on_a_stack(const void *address);

} // namespace emulation
