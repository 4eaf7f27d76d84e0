/* What the fake driver is told by its environment, and the failures that it is told to have. */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FAILURES_MAX = 16, NAME_MAX = 64 };

struct failure {
    char function[NAME_MAX];
    long call, code, times;
    long calls;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct failure failures[FAILURES_MAX];
static int failure_count = -1;
static CUresult broken = CUDA_SUCCESS;

long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}

static void read_failures(void) {
    const char *at = getenv("FAKE_CUDA_FAIL");
    for (failure_count = 0; at && *at && failure_count < FAILURES_MAX; failure_count++) {
        struct failure *failure = &failures[failure_count];
        failure->times = 1;
        int fields = sscanf(at, "%63[^:]:%ld:%ld:%ld", failure->function, &failure->call, &failure->code, &failure->times);
        if (fields < 3) {
            fprintf(stderr, "fake_cuda: cannot read FAKE_CUDA_FAIL at %s\n", at);
            abort();
        }
        at = strchr(at, ',');
        at = at ? at + 1 : NULL;
    }
}

/* Whether the reference says of a code that the process has to end for it. */
static int ends_context(CUresult code) {
    static const CUresult codes[] = {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 911, 999};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i] == code)
            return 1;
    return 0;
}

/* Whether failures are for the device that the thread works on. */
static int is_spared(void) {
    long place = setting("FAKE_CUDA_FAIL_PLACE", -1);
    return place >= 0 && (!current() || current()->device->place != place);
}

CUresult told_to_fail(const char *function) {
    if (is_spared())
        return CUDA_SUCCESS;
    for (int i = 0; i < failure_count; i++) {
        struct failure *failure = &failures[i];
        if (strcmp(failure->function, function))
            continue;
        long past = ++failure->calls - failure->call;
        if (past >= 0 && (failure->times == 0 || past < failure->times))
            return (CUresult)failure->code;
    }
    return CUDA_SUCCESS;
}

CUresult enter(const char *function) {
    pthread_mutex_lock(&lock);
    shared_lock();
    if (failure_count < 0)
        read_failures();
    if (broken)
        return broken;
    CUresult code = told_to_fail(function);
    if (ends_context(code))
        broken = code;
    return code;
}

CUresult leave(CUresult result) {
    if (ends_context(result))
        broken = result;
    shared_unlock();
    pthread_mutex_unlock(&lock);
    return result;
}

void pause_entry(void) {
    shared_unlock();
    pthread_mutex_unlock(&lock);
    pthread_mutex_lock(&lock);
    shared_lock();
}

/* A driver that waits, when the process ends, for a device that does not answer. A library that is only looked at is closed
 * again before it was told to start. */
__attribute__((destructor)) static void end(void) {
    while (setting("FAKE_CUDA_EXIT_HANGS", 0) && device_count() >= 0)
        pause();
}

/* For libraries beside this one: what FAKE_CUDA_FAIL says of a function of theirs, and whether the context has ended. */
API int fake_cuda_fails(const char *function, int *ended) {
    pthread_mutex_lock(&lock);
    if (failure_count < 0)
        read_failures();
    *ended = broken != CUDA_SUCCESS;
    int code = told_to_fail(function);
    pthread_mutex_unlock(&lock);
    return code;
}

/* In no reference: NVRTC asks the driver for tables by it, and, told that there are none, does without. */
API CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_SUPPORTED;
}
