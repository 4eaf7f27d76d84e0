/* A fake of NVIDIA's cuBLASLt, beside that for the driver, for tests on machines without a GPU: real products on what the
 * fake driver calls device memory, and a refusal of all that the reference refuses or does not promise.
 *
 * Written from the public reference, "Using the cuBLASLt API". It fails as FAKE_CUDA_FAIL says, with statuses as codes.
 *
 *   FAKE_CUDA_ALGORITHMS  MS[,MS...]: how many algorithms the library has for each product, and what a product by each of them
 *                         takes by the fake driver's clock; that first which the library expects to be the fastest. Unless
 *                         set, there is one
 *   FAKE_CUDA_EVEN        the number of an algorithm, from 0, that takes no odd numbers of rows
 *   FAKE_CUDA_CODE_MIB    what the code of each takes of the device from its first product on, 0 */
#include "cublaslt.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { MARK = 0x7374616e64696e, ALIGNMENT_MIN = 16, ALIGNMENT_DEFAULT = 256, WORKSPACE = 1 << 20, ROWS_LARGE = 128 };

enum { ALGORITHMS_MAX = 7 };

static size_t heuristics, products, products_by[ALGORITHMS_MAX];
static int is_loaded[ALGORITHMS_MAX];

/* How often algorithms were asked for, and products made: all, and those by an algorithm. */
API size_t fake_cuda_heuristics(void) {
    return heuristics;
}

API size_t fake_cuda_products(void) {
    return products;
}

API size_t fake_cuda_products_by(size_t number) {
    return number < ALGORITHMS_MAX ? products_by[number] : 0;
}

/* How many algorithms there are, with what a product by each takes; one that takes nothing, if nobody says. */
static int algorithms(double *ms) {
    const char *at = getenv("FAKE_CUDA_ALGORITHMS");
    int count = 0;
    while (at && *at && count < ALGORITHMS_MAX) {
        char *end;
        ms[count++] = strtod(at, &end);
        at = *end == ',' ? end + 1 : end;
    }
    return count ? count : 1;
}

static void *driver(const char *symbol) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void *found = library ? dlsym(library, symbol) : NULL;
    if (!found)
        abort();
    return found;
}

/* What the fake driver was told of a function; a context that has ended fails it as well. */
static int fails(const char *function) {
    int ended;
    int told = ((int (*)(const char *, int *))driver("fake_cuda_fails"))(function, &ended);
    return told ? told : ended ? EXECUTION_FAILED : SUCCESS;
}

/* The driver's code that a stream ends with whose product touches what is freed. */
enum { ILLEGAL_ADDRESS = 700 };

static int is_on_device(const void *at, size_t bytes) {
    return ((int (*)(const void *, size_t))driver("fake_cuda_holds"))(at, bytes);
}

static size_t element(int data) {
    return data == R_32F ? 4 : 2;
}

API int cublasLtCreate(void **handle) {
    void *context = NULL;
    int told = fails(__func__);
    if (told)
        return told;
    if (((int (*)(void **))driver("cuCtxGetCurrent"))(&context) || !context)
        return NOT_INITIALIZED;
    *handle = malloc(1);
    return SUCCESS;
}

API int cublasLtDestroy(void *handle) {
    free(handle);
    return SUCCESS;
}

API size_t cublasLtGetVersion(void) {
    return 130000;
}

API int cublasLtMatmulDescCreate(struct desc **desc, int compute, int scale) {
    if (compute != COMPUTE_32F || scale != R_32F)
        return INVALID_VALUE;
    *desc = malloc(sizeof **desc);
    **desc = (struct desc){compute, scale, {OP_N, OP_N}, EPILOGUE_DEFAULT, NULL};
    return SUCCESS;
}

API int cublasLtMatmulDescDestroy(struct desc *desc) {
    free(desc);
    return SUCCESS;
}

/* Copies an attribute of just so many bytes. */
static int set(void *to, size_t size, const void *value, size_t bytes) {
    if (!value || bytes != size)
        return INVALID_VALUE;
    memcpy(to, value, size);
    return SUCCESS;
}

API int cublasLtMatmulDescSetAttribute(struct desc *desc, int attribute, const void *value, size_t bytes) {
    switch (attribute) {
    case 3: /* TRANSA */
    case 4: /* TRANSB */
        return set(&desc->transposed[attribute - 3], 4, value, bytes);
    case 7: /* EPILOGUE */
        return set(&desc->epilogue, 4, value, bytes);
    case 8: /* BIAS_POINTER */
        return set(&desc->bias, 8, value, bytes);
    default:
        return INVALID_VALUE;
    }
}

API int cublasLtMatrixLayoutCreate(struct layout **layout, int data, uint64_t rows, uint64_t columns, int64_t leading) {
    if (data != R_32F && data != R_16F && data != R_16BF)
        return INVALID_VALUE;
    *layout = malloc(sizeof **layout);
    **layout = (struct layout){data, rows, columns, leading};
    return SUCCESS;
}

API int cublasLtMatrixLayoutDestroy(struct layout *layout) {
    free(layout);
    return SUCCESS;
}

API int cublasLtMatrixLayoutSetAttribute(struct layout *layout, int attribute, const void *value, size_t bytes) {
    return attribute == 3 /* COLS */ ? set(&layout->columns, 8, value, bytes) : INVALID_VALUE;
}

API int cublasLtMatmulPreferenceCreate(struct preference **preference) {
    *preference = malloc(sizeof **preference);
    **preference = (struct preference){0, ~0u, {ALIGNMENT_DEFAULT, ALIGNMENT_DEFAULT, ALIGNMENT_DEFAULT, ALIGNMENT_DEFAULT}};
    return SUCCESS;
}

API int cublasLtMatmulPreferenceDestroy(struct preference *preference) {
    free(preference);
    return SUCCESS;
}

API int cublasLtMatmulPreferenceSetAttribute(struct preference *preference, int attribute, const void *value, size_t bytes) {
    switch (attribute) {
    case 1: /* MAX_WORKSPACE_BYTES */
        return set(&preference->workspace, 8, value, bytes);
    case 3: /* REDUCTION_SCHEME_MASK */
        return set(&preference->reductions, 4, value, bytes);
    case 5: /* MIN_ALIGNMENT_A_BYTES to _D_BYTES */
    case 6:
    case 7:
    case 8:
        return set(&preference->alignment[attribute - 5], 4, value, bytes);
    default:
        return INVALID_VALUE;
    }
}

/* Whether the matrices can be multiplied at all. */
static int fit(const struct desc *desc, const struct layout *a, const struct layout *b, const struct layout *c, const struct layout *d) {
    int a_turned = desc->transposed[0] == OP_T, b_turned = desc->transposed[1] == OP_T;
    uint64_t rows = a_turned ? a->columns : a->rows, inner = a_turned ? a->rows : a->columns;
    uint64_t columns = b_turned ? b->rows : b->columns, other = b_turned ? b->columns : b->rows;
    const struct layout *all[] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if (all[i]->leading < (int64_t)all[i]->rows || all[i]->data != d->data || !all[i]->rows || !all[i]->columns)
            return 0;
    return inner == other && d->rows == rows && d->columns == columns && c->rows == rows && c->columns == columns;
}

API int cublasLtMatmulAlgoGetHeuristic(
    void *handle, const struct desc *desc, const struct layout *a, const struct layout *b, const struct layout *c,
    const struct layout *d, const struct preference *preference, int wanted, struct result *results, int *count
) {
    int told = fails(__func__);
    heuristics++;
    *count = 0;
    if (told)
        return told;
    /* By no reference, but callers have found that asking takes a bias, if there is to be one. */
    if (!handle || wanted < 1 || !fit(desc, a, b, c, d) || (desc->epilogue == EPILOGUE_BIAS && !desc->bias))
        return INVALID_VALUE;
    uint64_t alignment = ALIGNMENT_DEFAULT, workspace = d->columns >= ROWS_LARGE ? WORKSPACE : 0;
    for (int i = 0; i < 4; i++)
        if (preference->alignment[i] < alignment)
            alignment = preference->alignment[i];
    if ((desc->epilogue != EPILOGUE_DEFAULT && desc->epilogue != EPILOGUE_BIAS) || alignment < ALIGNMENT_MIN ||
        workspace > preference->workspace)
        return NOT_SUPPORTED;
    /* One that is of no use, as there may be, then those that are. */
    memset(results, 0, (size_t)wanted * sizeof *results);
    results[0].state = 4711;
    *count = 1;
    uint64_t inner = desc->transposed[0] == OP_T ? a->rows : a->columns;
    double ms[ALGORITHMS_MAX] = {0};
    for (int number = 0; number < algorithms(ms) && *count < wanted; number++) {
        results[*count].algorithm = (struct algorithm){
            MARK, d->rows, inner, workspace, alignment, d->data, desc->epilogue, (uint64_t)number, 0
        };
        results[(*count)++].workspace = workspace;
    }
    return SUCCESS;
}

static size_t bytes_of(const struct layout *layout) {
    return ((size_t)layout->leading * (layout->columns - 1) + layout->rows) * element(layout->data);
}

/* Whether a matrix lies where the algorithm may have it. */
static int lies(const struct layout *layout, const void *at, uint64_t alignment) {
    return (uintptr_t)at % alignment == 0 && is_on_device(at, bytes_of(layout));
}

/* The same for work that runs: what was freed behind it in its stream is there. */
static int is_still_there(const void *at, size_t bytes) {
    return ((int (*)(const void *, size_t))driver("fake_cuda_still_holds"))(at, bytes);
}

static int reaches(const struct layout *layout, const void *at) {
    return is_still_there(at, bytes_of(layout));
}

/* A product on its stream: descriptions and factors are copied in the call, matrices are read when it runs. */
struct product {
    struct desc desc;
    struct layout a, b, d;
    const void *a_at, *b_at;
    void *d_at, *workspace;
    size_t workspace_bytes;
    double ms;
};

static int run(void *data) {
    const struct product *product = data;
    const struct desc *desc = &product->desc;
    if (!reaches(&product->a, product->a_at) || !reaches(&product->b, product->b_at) || !reaches(&product->d, product->d_at) ||
        (desc->epilogue == EPILOGUE_BIAS && !is_still_there(desc->bias, product->d.rows * element(product->d.data))) ||
        !is_still_there(product->workspace, product->workspace_bytes))
        return ILLEGAL_ADDRESS;
    /* Partial sums go there. */
    if (product->workspace_bytes)
        memset(product->workspace, 0xff, product->workspace_bytes);
    multiply(desc, &product->a, product->a_at, &product->b, product->b_at, &product->d, product->d_at);
    ((void (*)(double))driver("fake_cuda_takes"))(product->ms);
    return SUCCESS;
}

/* The code of an algorithm comes to the device with its first product. */
static int load(uint64_t number) {
    const char *mib = getenv("FAKE_CUDA_CODE_MIB");
    if (is_loaded[number] || !mib)
        return SUCCESS;
    if (((int (*)(size_t))driver("fake_cuda_load_code"))((size_t)atol(mib) << 20))
        return ALLOC_FAILED;
    is_loaded[number] = 1;
    return SUCCESS;
}

API int cublasLtMatmul(
    void *handle, const struct desc *desc, const float *alpha, const void *a_at, const struct layout *a, const void *b_at,
    const struct layout *b, const float *beta, const void *c_at, const struct layout *c, void *d_at, const struct layout *d,
    const struct algorithm *algorithm, void *workspace, size_t workspace_bytes, void *stream
) {
    int told = fails(__func__);
    if (told)
        return told;
    if (!handle || !stream || !algorithm || algorithm->mark != MARK || !fit(desc, a, b, c, d))
        return INVALID_VALUE;
    uint64_t inner = desc->transposed[0] == OP_T ? a->rows : a->columns;
    double ms[ALGORITHMS_MAX] = {0};
    if (algorithm->rows != d->rows || algorithm->inner != inner || algorithm->data != d->data ||
        algorithm->epilogue != desc->epilogue || algorithm->number >= (uint64_t)algorithms(ms))
        return INVALID_VALUE;
    const char *even = getenv("FAKE_CUDA_EVEN");
    if (*alpha != 1 || *beta != 0 || c_at != d_at)
        return NOT_SUPPORTED;
    /* What the worker calls rows are columns here. */
    if (even && algorithm->number == (uint64_t)atol(even) && d->columns % 2)
        return NOT_SUPPORTED;
    if (workspace_bytes < algorithm->workspace ||
        (algorithm->workspace && ((uintptr_t)workspace % ALIGNMENT_DEFAULT || !is_on_device(workspace, workspace_bytes))))
        return INVALID_VALUE;
    if (!lies(a, a_at, algorithm->alignment) || !lies(b, b_at, algorithm->alignment) || !lies(d, d_at, algorithm->alignment))
        return INVALID_VALUE;
    if (desc->epilogue == EPILOGUE_BIAS && !is_on_device(desc->bias, d->rows * element(d->data)))
        return INVALID_VALUE;
    int is_here = load(algorithm->number);
    if (is_here != SUCCESS)
        return is_here;
    struct product product = {
        *desc, *a, *b, *d, a_at, b_at, d_at, workspace, algorithm->workspace, ms[algorithm->number]
    };
    int given = ((int (*)(void *, int (*)(void *), const void *, size_t))driver("fake_cuda_give_work"))(
        stream, run, &product, sizeof product
    );
    products++;
    products_by[algorithm->number]++;
    return given ? EXECUTION_FAILED : SUCCESS;
}
