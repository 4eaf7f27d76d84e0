// The encoder's kernels, compiled for the CPU: their own source, once per type of elements, and the entry that the
// fake driver calls at a launch.

#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace in_f32 {
#define ELEMENT_F32
#include "element.cuh"
#include "norm.cuh"
#include "gelu.cuh"
#include "sees.cuh"
#include "attention_lanes.cuh"
#include "embed.cu"
#include "add_norm.cu"
#include "rotate.cu"
#include "linear_f32.cu"
#include "attention_f32.cu"
#include "attention_wide.cu"
#include "pool.cu"
#include "bias_gelu.cu"
#include "gate.cu"
#undef ELEMENT_F32
} // namespace in_f32

namespace in_f16 {
#define ELEMENT_F16
#include "element.cuh"
#include "norm.cuh"
#include "gelu.cuh"
#include "sees.cuh"
#include "attention_lanes.cuh"
#include "embed.cu"
#include "add_norm.cu"
#include "rotate.cu"
#include "tile.cuh"
#include "linear.cu"
#include "attention.cu"
#include "attention_wide.cu"
#include "pool.cu"
#include "bias_gelu.cu"
#include "gate.cu"
#undef ELEMENT_F16
} // namespace in_f16

namespace in_bf16 {
#define ELEMENT_BF16
#include "element.cuh"
#include "norm.cuh"
#include "gelu.cuh"
#include "sees.cuh"
#include "attention_lanes.cuh"
#include "embed.cu"
#include "add_norm.cu"
#include "rotate.cu"
#include "tile.cuh"
#include "linear.cu"
#include "attention.cu"
#include "attention_wide.cu"
#include "pool.cu"
#include "bias_gelu.cu"
#include "gate.cu"
#undef ELEMENT_BF16
} // namespace in_bf16

namespace {

// Codes of the driver's.
constexpr int INVALID_VALUE = 1;
constexpr int NOT_FOUND = 500;
constexpr int ILLEGAL_ADDRESS = 700;

// The kernel with which tests/gpu/run looks at what becomes of a device: all it does is write to nobody's address.
constexpr char CRASH[] = "crash";

template <auto kernel> struct Call;

// A kernel, told where each of its arguments is.
template <typename... Argument, void (*kernel)(Argument...)> struct Call<kernel> {
    template <size_t... at>
    __attribute__((no_sanitize("thread", "alignment"), noinline)) static void each(void **arguments, std::index_sequence<at...>) {
        kernel(*static_cast<Argument *>(arguments[at])...);
    }
    static void with(void **arguments) {
        each(arguments, std::index_sequence_for<Argument...>());
    }
    static constexpr size_t COUNT = sizeof...(Argument);
    static constexpr size_t SIZES[] = {sizeof(Argument)...};
};

struct Named {
    const char *name;
    emulation::Kernel kernel;
    size_t count;
    const size_t *sizes;
};

#define NAMED(space, name)                                                                                             \
    { #name, Call<&space::name>::with, Call<&space::name>::COUNT, Call<&space::name>::SIZES }
#define OF_16_BITS(space, type)                                                                                        \
    NAMED(space, embed_##type), NAMED(space, add_norm_##type), NAMED(space, pool_##type),                              \
        NAMED(space, bias_gelu_##type), NAMED(space, rotate_##type), NAMED(space, gate_##type),                        \
        NAMED(space, linear_large_##type), NAMED(space, linear_large_gelu_##type), NAMED(space, linear_small_##type),  \
        NAMED(space, linear_small_gelu_##type), NAMED(space, attention_16_##type), NAMED(space, attention_32_##type),  \
        NAMED(space, attention_64_##type), NAMED(space, attention_128_##type),              \
        NAMED(space, attention_256_##type)

const Named KERNELS[] = {
    NAMED(in_f32, embed_f32),
    NAMED(in_f32, add_norm_f32),
    NAMED(in_f32, pool_f32),
    NAMED(in_f32, bias_gelu_f32),
    NAMED(in_f32, rotate_f32),
    NAMED(in_f32, gate_f32),
    NAMED(in_f32, linear_small_f32),
    NAMED(in_f32, linear_small_gelu_f32),
    NAMED(in_f32, attention_16_f32),
    NAMED(in_f32, attention_32_f32),
    NAMED(in_f32, attention_64_f32),
    NAMED(in_f32, attention_128_f32),
    NAMED(in_f32, attention_256_f32),
    OF_16_BITS(in_f16, f16),
    OF_16_BITS(in_bf16, bf16),
};

// A kernel's arguments are numbers and addresses; the kernel with the most of them has 13.
constexpr size_t ARGUMENTS_MAX = 16;

} // namespace

// What the driver keeps of a launch until it runs: the arguments are copied in the call.
struct launch {
    const Named *kernel;
    unsigned grid[3], block[3];
    unsigned long long values[ARGUMENTS_MAX];
};

extern "C" __attribute__((no_sanitize("thread"))) launch *
fake_cuda_prepare(const char *kernel, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes, void **params,
                  int *code) {
    const Named *found = nullptr;
    for (const Named &named : KERNELS) {
        if (std::strcmp(named.name, kernel) == 0) found = &named;
    }
    const bool crashes = std::strcmp(CRASH, kernel) == 0;
    if (!found && !crashes) {
        std::fprintf(stderr, "emulation: there is no kernel %s\n", kernel);
        *code = NOT_FOUND;
        return nullptr;
    }
    if (shared_bytes != 0) {
        std::fprintf(stderr, "emulation: %s is launched with dynamic shared memory, which it has none of\n", kernel);
        *code = INVALID_VALUE;
        return nullptr;
    }
    auto *made = static_cast<launch *>(std::calloc(1, sizeof(struct launch)));
    if (!made) std::abort();
    made->kernel = found;
    for (int i = 0; i < 3; i++) {
        made->grid[i] = grid[i];
        made->block[i] = block[i];
    }
    for (size_t i = 0; found && i < found->count; i++) {
        if (i == ARGUMENTS_MAX || found->sizes[i] > sizeof made->values[i]) std::abort();
        std::memcpy(&made->values[i], params[i], found->sizes[i]);
    }
    return made;
}

extern "C" __attribute__((no_sanitize("thread"))) int fake_cuda_run(launch *launch) {
    int code = ILLEGAL_ADDRESS;
    if (launch->kernel) {
        void *arguments[ARGUMENTS_MAX];
        for (size_t i = 0; i < ARGUMENTS_MAX; i++) {
            arguments[i] = &launch->values[i];
        }
        code = emulation::launch(launch->kernel->name, launch->kernel->kernel, launch->grid, launch->block, arguments);
    }
    std::free(launch);
    return code;
}
