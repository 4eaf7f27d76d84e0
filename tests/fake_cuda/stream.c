/* Streams and events. What a stream is given is done as late as the reference allows: when somebody waits for it, and then in
 * order, up to what is waited for. So what nobody waits for is never done, and shows.
 *
 * Reference: "Stream Management", "Event Management" and "Stream synchronization behavior" of the driver API. */
#include "fake_cuda.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NON_BLOCKING = 1, DISABLE_TIMING = 2, NOT_READY = 600 };

/* What any piece of work takes, in milliseconds of a clock that nothing else moves; products take what they are told. */
static const double PIECE_MS = 0.001;
static double clock_ms;

/* Something to do. Numbers count what all streams were given. */
struct piece {
    struct piece *next;
    unsigned long long number;
    work run;
    struct host_range host;
    _Alignas(16) unsigned char data[];
};

struct stream {
    struct stream *next;
    /* Of a blocking stream, work waits for that of the default stream before it, and the other way round. */
    int is_blocking;
    struct piece *first, **last;
    /* The number of the newest piece that is done. */
    unsigned long long done;
};

struct event {
    struct stream *stream;
    unsigned long long number;
    /* When the newest of its records was reached. */
    double reached_ms;
    unsigned long long records;
    int has_time, is_destroyed;
};

/* Streams and events live as long as the process: events may name streams, and streams events, after their end. */
static struct stream *streams;
static struct stream default_stream = {.is_blocking = 1, .last = &default_stream.first};
static unsigned long long given;
/* Waits from now on that are left out, for tests: after `spared`, `ignored` of them. */
static size_t spared, ignored;

/* For tests of tests: after so many waits, so many do nothing and say that all is well. */
API void fake_cuda_ignore_waits(size_t after, size_t count) {
    CUresult entered = enter(__func__);
    spared = after;
    ignored = count;
    leave(entered);
}

static int is_ignored(void) {
    if (ignored == 0 || spared > 0) {
        spared -= spared > 0;
        return 0;
    }
    ignored--;
    return 1;
}

/* Does what a stream was given, up to the piece of a number. Between pieces others may look at the device, unless this is
 * itself part of a piece. */
static CUresult run_until(struct stream *stream, unsigned long long number, int may_pause) {
    while (stream->first && stream->first->number <= number) {
        struct piece *piece = stream->first;
        stream->first = piece->next;
        if (!stream->first)
            stream->last = &stream->first;
        clock_ms += PIECE_MS;
        CUresult result = piece->run(piece->data);
        stream->done = piece->number;
        free(piece);
        if (result != CUDA_SUCCESS)
            return result;
        if (may_pause)
            pause_entry();
    }
    return CUDA_SUCCESS;
}

static CUresult run_all(int (*is_meant)(const struct stream *stream)) {
    unsigned long long now = given;
    CUresult result = run_until(&default_stream, now, 1);
    for (struct stream *stream = streams; stream && result == CUDA_SUCCESS; stream = stream->next)
        if (is_meant(stream))
            result = run_until(stream, now, 1);
    return result;
}

static int is_blocking(const struct stream *stream) {
    return stream->is_blocking;
}

static int is_any(const struct stream *stream) {
    (void)stream;
    return 1;
}

CUresult wait_for_default_stream(void) {
    return run_all(is_blocking);
}

CUresult wait_for_stream(CUstream stream) {
    return run_until(stream ? stream : &default_stream, given, 1);
}

CUresult give_work(CUstream to, work run, const void *data, size_t bytes, struct host_range host) {
    struct stream *stream = to ? to : &default_stream;
    if (stream->is_blocking) {
        CUresult earlier = to ? run_until(&default_stream, given, 1) : run_all(is_blocking);
        if (earlier != CUDA_SUCCESS)
            return earlier;
    }
    struct piece *piece = malloc(sizeof *piece + bytes);
    if (!piece)
        abort();
    *piece = (struct piece){.number = ++given, .run = run, .host = host};
    if (bytes)
        memcpy(piece->data, data, bytes);
    *stream->last = piece;
    stream->last = &piece->next;
    return CUDA_SUCCESS;
}

static int touches(const struct stream *stream, struct host_range range) {
    for (const struct piece *piece = stream->first; piece; piece = piece->next)
        if (piece->host.bytes && piece->host.start < range.start + range.bytes &&
            range.start < piece->host.start + piece->host.bytes)
            return 1;
    return 0;
}

int is_under_way(struct host_range range) {
    int is_touched = touches(&default_stream, range);
    for (struct stream *stream = streams; stream; stream = stream->next)
        is_touched |= touches(stream, range);
    return is_touched;
}

/* For libraries beside this one: `give_work` without host memory. */
API CUresult fake_cuda_give_work(CUstream stream, work run, const void *data, size_t bytes) {
    struct host_range none = {0, 0};
    ENTRY({ result = give_work(stream, run, data, bytes, none); });
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    ENTRY({
        if (!current()) {
            result = CUDA_ERROR_INVALID_CONTEXT;
        } else {
            struct stream *made = calloc(1, sizeof *made);
            if (!made)
                abort();
            made->is_blocking = !(flags & NON_BLOCKING);
            made->last = &made->first;
            made->next = streams;
            streams = made;
            *stream = made;
        }
    });
}

/* The reference: what is left of its work is done without anybody waiting. */
API CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTRY({ result = run_until(stream, given, 1); });
}

API CUresult cuStreamSynchronize(CUstream stream) {
    ENTRY({
        if (!current())
            result = CUDA_ERROR_INVALID_CONTEXT;
        else if (!is_ignored())
            result = wait_for_stream(stream);
    });
}

API CUresult cuCtxSynchronize(void) {
    ENTRY({
        if (!current())
            result = CUDA_ERROR_INVALID_CONTEXT;
        else if (!is_ignored())
            result = run_all(is_any);
    });
}

/* For libraries beside this one, while their work runs: it takes so long. */
API void fake_cuda_takes(double ms) {
    clock_ms += ms;
}

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTRY({
        *event = calloc(1, sizeof **event);
        if (!*event)
            abort();
        (*event)->has_time = !(flags & DISABLE_TIMING);
    });
}

/* One of an event's. */
struct record {
    struct event *event;
    unsigned long long number;
};

static CUresult reach(void *data) {
    const struct record *record = data;
    if (record->event->records == record->number)
        record->event->reached_ms = clock_ms;
    return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
    struct host_range none = {0, 0};
    ENTRY({
        if (event->is_destroyed) {
            result = CUDA_ERROR_INVALID_HANDLE;
        } else {
            struct record record = {event, ++event->records};
            result = give_work(stream, reach, &record, sizeof record, none);
            event->stream = stream ? stream : &default_stream;
            event->number = given;
        }
    });
}

/* An event that was never recorded is done. */
static int is_done(const struct event *event) {
    return !event->stream || event->stream->done >= event->number;
}

API CUresult cuEventSynchronize(CUevent event) {
    ENTRY({
        if (event->is_destroyed)
            result = CUDA_ERROR_INVALID_HANDLE;
        else if (!is_done(event) && !is_ignored())
            result = run_until(event->stream, event->number, 1);
    });
}

/* The reference: both are recorded, have a time, and have been reached. */
API CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
    ENTRY({
        CUevent both[] = {start, end};
        for (int i = 0; i < 2; i++)
            if (both[i]->is_destroyed || !both[i]->has_time || !both[i]->stream)
                result = CUDA_ERROR_INVALID_HANDLE;
        if (result == CUDA_SUCCESS && !(is_done(start) && is_done(end)))
            result = NOT_READY;
        if (result == CUDA_SUCCESS)
            *ms = (float)(end->reached_ms - start->reached_ms);
    });
}

/* Asking sets it going: it is not done now, and is when it is asked for again. */
API CUresult cuEventQuery(CUevent event) {
    ENTRY({
        if (!is_done(event)) {
            result = run_until(event->stream, event->number, 1);
            if (result == CUDA_SUCCESS)
                result = NOT_READY;
        }
    });
}

/* Work of its own that it waits for is found by what was recorded last, as the reference has it. */
static CUresult wait_for(void *data) {
    const struct event *event = data;
    return is_done(event) ? CUDA_SUCCESS : run_until(event->stream, event->number, 0);
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    (void)flags;
    struct host_range none = {0, 0};
    ENTRY({ result = give_work(stream, wait_for, event, sizeof *event, none); });
}

/* A record of it that is under way is still reached. */
API CUresult cuEventDestroy_v2(CUevent event) {
    ENTRY({
        if (event->is_destroyed)
            result = CUDA_ERROR_INVALID_HANDLE;
        event->is_destroyed = 1;
    });
}
