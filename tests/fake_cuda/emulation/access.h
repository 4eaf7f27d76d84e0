// What a kernel reads and writes, looked at.
#pragma once

#include <cstddef>

namespace emulation {

// Ends the launch.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

unsigned current_thread();

// Looks at an access of the current thread.
void look_at(const void *address, size_t bytes, bool writes);

// From now on the current thread writes there, until it says that it has, by `look_at`.
void begin_write(const void *address, size_t bytes);

// A launch begins. Until it ends, nothing is allocated or freed.
void launch_begins();

// A block begins: nothing in its shared memory is allocated or written.
void shared_fresh(unsigned char *start);

// The block has an array there.
void shared_allows(size_t start, size_t bytes);

// What threads did before is done for all of the block, or for all of a warp.
void barrier_passed();
void warp_synced(unsigned warp);

} // namespace emulation
