/* Processes on the same device: a file with a row for each, and what it holds. */
#include "fake_cuda.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ROWS = 64 };

struct row {
    long process;
    size_t held;
};

static int file = -1;
static struct row *rows;

static int is_alive(long process) {
    return process && (kill((pid_t)process, 0) == 0 || errno == EPERM);
}

static void open_file(const char *name) {
    file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, ROWS * sizeof *rows))
        abort();
    rows = mmap(NULL, ROWS * sizeof *rows, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (rows == MAP_FAILED)
        abort();
}

void shared_lock(void) {
    const char *name = getenv("FAKE_CUDA_SHARED");
    if (!name)
        return;
    if (!rows)
        open_file(name);
    while (flock(file, LOCK_EX) && errno == EINTR)
        ;
}

/* What this process holds now goes into its row. */
static void tell(size_t held) {
    struct row *mine = NULL;
    for (int i = 0; i < ROWS; i++)
        if (rows[i].process == getpid())
            mine = &rows[i];
    for (int i = 0; i < ROWS && !mine; i++)
        if (!is_alive(rows[i].process))
            mine = &rows[i];
    if (!mine)
        abort();
    mine->process = getpid();
    mine->held = held;
}

void shared_unlock(void) {
    if (!rows)
        return;
    tell(devices_held());
    flock(file, LOCK_UN);
}

size_t shared_foreign(void) {
    size_t held = 0;
    for (int i = 0; rows && i < ROWS; i++)
        if (rows[i].process != getpid() && is_alive(rows[i].process))
            held += rows[i].held;
    return held;
}

/* For the fake libnvidia-ml: the processes that hold something, and how much; with no file, this one alone. Returns how many
 * there are, of which the first `most` are told. */
API int fake_cuda_processes(long *processes, size_t *held, int most) {
    CUresult entered = enter(__func__);
    int count = 0;
    struct row mine = {getpid(), devices_held()};
    for (int i = 0; i <= ROWS; i++) {
        const struct row *row = i == ROWS ? &mine : rows ? &rows[i] : NULL;
        if (!row || !row->held || !is_alive(row->process) || (row != &mine && row->process == getpid()))
            continue;
        if (count < most) {
            processes[count] = row->process;
            held[count] = row->held;
        }
        count++;
    }
    leave(entered);
    return count;
}
