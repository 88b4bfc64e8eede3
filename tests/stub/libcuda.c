/* A stand-in for libcuda.so.1: cuda-bindings and the driver wrappers of this project run against it where there is no GPU.
 *
 * Device memory is host memory. Kernels compute nothing and take time: a stream has a clock, which its kernels move on, and an event is
 * over when the process' clock has come to that of its stream. Calls that wait move the process' clock on instead. What is stored and
 * copied is so at once and in order, or, between stub_hold(1) and stub_hold(0), when it is let go: then streams keep their own order and wait
 * for each other's events, and the most important one goes first.
 *
 * It keeps the rules that the documentation states and that a fake of the wrapper can't see, and writes down each call against them
 * (stub_violations): a call needs a current context; streams and events go with contexts of one device; a green context is current
 * in one thread at a time; capture states; handles that are alive, destroyed once. stub_fail makes one call fail, stub_live counts
 * handles, stub_calls calls.
 *
 * Written from the public documentation of the driver's interface. It needs no header of CUDA's.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, CONTEXT_IS_DESTROYED = 709,
    LAUNCH_FAILED = 719, NOT_PERMITTED = 800, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
    CAPTURE_WRONG_THREAD = 908
};

static const struct { int code; const char *name, *words; } STATUSES[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"},
};

#define SMS 132
#define BLOCKS_PER_SM 2
#define CYCLES_PER_S 2e9
#define MEMORY (20ull << 30)
#define GRANULARITY (2ull << 20)
#define RESOURCE_BYTES 144 /* of CUdevResource; the type is first, the number of multiprocessors at 96 */
#define SM_COUNT_AT 96

typedef uint64_t ptr;
typedef enum { CONTEXT = 0x5A01, STREAM, EVENT, GRAPH, EXEC, MODULE, KERNEL, RESOURCE, PHYSICAL } Kind;
static const char *KINDS[] = {"context", "stream", "event", "graph", "exec", "module", "kernel", "resource", "physical"};
static int live[16];

typedef struct Context { Kind kind; int green, sms, retained; long thread; /* where a green one is current */ } Context;
typedef struct Event { Kind kind; Context *context; int timed, recorded, captured, pending; double at; } Event;
typedef struct Op { enum { SPIN, RECORD, WAIT, COPY, STORE, FILL, LAUNCH } what; void *stream, *target, *source; size_t nbytes; uint32_t value; double seconds;
                    struct Op *next; } Op;
typedef struct Graph { Kind kind; Op *ops; int nodes; } Graph;
typedef struct Stream { Kind kind; Context *context; int priority, sms, pending, seen, mode, invalid; long thread; double clock; Graph *capture; } Stream;
typedef struct Kernel { Kind kind; int moves; } Kernel;
typedef struct Resource { Kind kind; int sms; } Resource;
typedef struct Physical { Kind kind; int fd; size_t nbytes; } Physical;
typedef struct Range { struct Range *next; char *address; size_t nbytes; const char *what; } Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Context primary = {CONTEXT, 0, SMS, 0, 0};
static __thread Context *stack[16];
static __thread int depth;
static int initialized, held, broken, devices = 1, busy_streams; /* those that hold something back */
static Op *waiting, **waiting_end = &waiting;
static Range *ranges;
static Stream *capturing[64]; /* those under way */
static double latest; /* the greatest clock of all streams */
static char violations[1 << 14];
static struct Count { char name[64]; int calls, fail_with, fail_after; } counts[256];

static double ahead; /* seconds that were not waited for */
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec + ahead;
}
static void reach(double at) { if (at > now()) ahead += at - now(); }
static long self(void) { return syscall(SYS_gettid); }

static int violated(int status, const char *name, const char *format, ...) {
    char text[400];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    size_t used = strlen(violations);
    snprintf(violations + used, sizeof violations - used, "%s: %s\n", name, text);
    return status;
}

static struct Count *count_of(const char *name) {
    struct Count *each = counts;
    while (each->name[0] && strcmp(each->name, name)) each++;
    if (!each->name[0]) snprintf(each->name, sizeof each->name, "%s", name);
    return each;
}
static int counted(const char *name) {
    struct Count *each = count_of(name);
    each->calls++;
    if (each->fail_with && each->fail_after-- <= 0) {
        int status = each->fail_with;
        each->fail_with = 0;
        return status;
    }
    return broken;
}

static Context *root(Context *of) { return of && of->green ? &primary : of; }
static Context *current(void) { return depth ? stack[depth - 1] : NULL; }
static void *made(Kind kind, size_t size) {
    Kind *object = calloc(1, size);
    *object = kind;
    live[kind - CONTEXT]++;
    return object;
}
static int gone(void *object) { /* its memory stays, so that a later use of the handle is seen */
    Kind *kind = object;
    live[*kind - CONTEXT]--;
    *kind = 0;
    return SUCCESS;
}

/* The head of every call: one at a time; counted; failed if it is to fail. */
#define UNLOCK __attribute__((cleanup(unlock))) int locked = (pthread_mutex_lock(&lock), 1); (void)locked
static void unlock(int *of) { (void)of; pthread_mutex_unlock(&lock); }
#define ENTER UNLOCK; { int bad = counted(__func__); if (bad) return bad; }
#define INITIALIZED ENTER if (!initialized) return violated(NOT_INITIALIZED, __func__, "before cuInit");
#define CURRENT INITIALIZED if (!current()) return violated(INVALID_CONTEXT, __func__, "no context is current in this thread"); \
    if (!primary.retained) return violated(CONTEXT_IS_DESTROYED, __func__, "the primary context was released");
#define ALIVE(object, is) if (!(object) || *(Kind *)(object) != (is)) \
    return violated(INVALID_HANDLE, __func__, "no %s, or one that was destroyed", KINDS[(is) - CONTEXT]);
#define ON(s) ALIVE(s, STREAM) if (root((s)->context) != root(current())) \
    return violated(INVALID_CONTEXT, __func__, "the stream is of another device's context");
#define WANTED(condition) if (!(condition)) return violated(INVALID_VALUE, __func__, "not so: %s", #condition);
/* What may not be called while this thread captures (thread-local), or any thread does (global). */
#define SAFE for (int i = 0; i < 64; i++) if (capturing[i] && capturing[i]->mode != 2 && (capturing[i]->mode == 0 || capturing[i]->thread == self())) { \
    capturing[i]->invalid = 1; return violated(CAPTURE_UNSUPPORTED, __func__, "while a stream is captured"); }
#define NOT_CAPTURED(s) if ((s)->capture) { (s)->invalid = 1; return violated(CAPTURE_UNSUPPORTED, __func__, "on a stream that is captured"); }

/* ---- what the tests ask */

void stub_reset(void) { UNLOCK; violations[0] = 0; broken = held = 0; memset(counts, 0, sizeof counts); }
void stub_fail(const char *name, int status, int after) { UNLOCK; struct Count *of = count_of(name); of->fail_with = status; of->fail_after = after; }
void stub_break(int status) { UNLOCK; broken = status; }
void stub_devices(int count) { UNLOCK; devices = count; }
int stub_calls(const char *name) {
    UNLOCK;
    if (*name) return count_of(name)->calls;
    int all = 0;
    for (struct Count *each = counts; each->name[0]; each++) all += each->calls;
    return all;
}
const char *stub_called(int index) { UNLOCK; return index < 256 && counts[index].name[0] ? counts[index].name : NULL; }
const char *stub_violations(void) { return violations; }
int stub_live(const char *what) {
    UNLOCK;
    int found = 0;
    for (Range *each = ranges; each; each = each->next) found += !strcmp(each->what, what);
    for (int i = 0; i < 9; i++) if (!strcmp(KINDS[i], what)) found += live[i];
    return found;
}

/* ---- doing what streams were given */

static void done(Op *op) {
    Stream *stream = op->stream;
    double begin = stream->clock > now() ? stream->clock : now();
    Event *event = op->target;
    switch (op->what) {
    case SPIN:
        stream->clock = begin + op->seconds;
        if (op->target) { /* the stamps of `spin`: least begin and greatest end, in nanoseconds */
            uint64_t *stamps = op->target, first = begin * 1e9, last = stream->clock * 1e9;
            if (first < stamps[0]) stamps[0] = first;
            if (last > stamps[1]) stamps[1] = last;
        }
        break;
    case RECORD: event->at = begin; break;
    case WAIT: if (event->at > stream->clock) stream->clock = event->at; break;
    case COPY: memmove(op->target, op->source, op->nbytes); stream->clock = begin + op->nbytes / 50e9; break;
    case STORE: __atomic_store_n((uint32_t *)op->target, op->value, __ATOMIC_RELEASE); break;
    case FILL: for (size_t i = 0; i < op->nbytes; i++) ((uint32_t *)op->target)[i] = op->value; break;
    case LAUNCH: for (Op *each = ((Graph *)op->target)->ops; each; each = each->next) { each->stream = stream; done(each); } break;
    }
    if (stream->clock > latest) latest = stream->clock;
}
/* What is done next: the oldest op of the most important stream, but for streams whose oldest waits for a record that is still to come. */
static Op **next_op(void) {
    static int round;
    Op **best = NULL;
    if (busy_streams == 1) return &waiting;
    round++;
    for (Op **each = &waiting; *each; each = &(*each)->next) {
        Stream *stream = (*each)->stream;
        if (stream->seen == round) continue;
        stream->seen = round;
        Op *before = waiting;
        if ((*each)->what == WAIT) while (before != *each && !(before->what == RECORD && before->target == (*each)->target)) before = before->next;
        else before = *each;
        if (before == *each && (!best || stream->priority < ((Stream *)(*best)->stream)->priority)) best = each;
    }
    return best;
}
static void let_go(void) {
    while (waiting) {
        Op **at = next_op(), *op = *at;
        *at = op->next;
        if (!--((Stream *)op->stream)->pending) busy_streams--;
        if (op->what == RECORD) ((Event *)op->target)->pending--;
        done(op);
        free(op);
    }
    waiting_end = &waiting;
}
void stub_hold(int on) { UNLOCK; held = on; if (!on) let_go(); }

static int submit(Stream *stream, Op op) {
    op.stream = stream;
    op.next = NULL;
    if (stream->capture) {
        Op **end = &stream->capture->ops;
        while (*end) end = &(*end)->next;
        *end = memcpy(malloc(sizeof op), &op, sizeof op);
        stream->capture->nodes++;
    } else if (held) {
        *waiting_end = memcpy(malloc(sizeof op), &op, sizeof op);
        waiting_end = &(*waiting_end)->next;
        if (!stream->pending++) busy_streams++;
        if (op.what == RECORD) ((Event *)op.target)->pending++;
    } else
        done(&op);
    return SUCCESS;
}

/* ---- the driver */

int cuGetErrorName(int status, const char **name) {
    for (size_t i = 0; i < sizeof STATUSES / sizeof *STATUSES; i++) if (STATUSES[i].code == status) { *name = STATUSES[i].name; return SUCCESS; }
    *name = NULL;
    return INVALID_VALUE;
}
int cuGetErrorString(int status, const char **words) {
    for (size_t i = 0; i < sizeof STATUSES / sizeof *STATUSES; i++) if (STATUSES[i].code == status) { *words = STATUSES[i].words; return SUCCESS; }
    *words = NULL;
    return INVALID_VALUE;
}
int cuInit(unsigned flags) {
    ENTER
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!devices || (visible && !*visible)) return NO_DEVICE;
    WANTED(flags == 0)
    initialized = 1;
    return SUCCESS;
}
int cuDriverGetVersion(int *version) { ENTER *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { INITIALIZED *count = devices; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { INITIALIZED if (ordinal < 0 || ordinal >= devices) return INVALID_DEVICE; *device = ordinal; return SUCCESS; }
int cuDeviceGetName(char *name, int length, int device) { INITIALIZED WANTED(device == 0 && length > 8) snprintf(name, length, "Stub GPU"); return SUCCESS; }
int cuDeviceTotalMem(size_t *bytes, int device) { INITIALIZED WANTED(device == 0) *bytes = MEMORY; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    INITIALIZED
    WANTED(device == 0)
    switch (which) {
    case 16: *value = SMS; break;
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    default: *value = 1;
    }
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(Context **context, int device) {
    INITIALIZED
    WANTED(device == 0)
    static int kept; /* the real library opens a socket and pipes with its first context, and keeps them for the process' life */
    if (!kept++) kept += socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0) + eventfd(0, EFD_CLOEXEC);
    primary.retained++;
    *context = &primary;
    return SUCCESS;
}
int cuDevicePrimaryCtxRelease(int device) {
    INITIALIZED
    WANTED(device == 0)
    if (!primary.retained) return violated(INVALID_CONTEXT, __func__, "released more often than it was taken");
    primary.retained--;
    return SUCCESS;
}
static int leave(Context *context) { if (context && context->green) context->thread = 0; return SUCCESS; }
static int take(const char *name, Context *context) {
    if (!context || !context->green) return SUCCESS;
    if (context->thread && context->thread != self())
        return violated(SUCCESS, name, "a green context is made current in a second thread");
    context->thread = self();
    return SUCCESS;
}
int cuCtxSetCurrent(Context *context) {
    INITIALIZED
    if (context) { ALIVE(context, CONTEXT) }
    leave(current());
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return take(__func__, context);
}
int cuCtxGetCurrent(Context **context) { INITIALIZED *context = current(); return SUCCESS; }
int cuCtxPushCurrent(Context *context) { INITIALIZED ALIVE(context, CONTEXT) WANTED(depth < 16) stack[depth++] = context; return take(__func__, context); }
int cuCtxPopCurrent(Context **context) { CURRENT leave(current()); depth--; if (context) *context = stack[depth]; return SUCCESS; }
int cuCtxGetDevice(int *device) { CURRENT *device = 0; return SUCCESS; }
int cuCtxSynchronize(void) { CURRENT SAFE let_go(); reach(latest); return SUCCESS; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { CURRENT *least = 0; *greatest = -5; return SUCCESS; }
int cuMemGetInfo(size_t *unused, size_t *all) { CURRENT *unused = MEMORY / 2; *all = MEMORY; return SUCCESS; }

/* streams and events */

static int new_stream(const char *name, Stream **stream, Context *context, unsigned flags, int priority) {
    if (flags != 1) return violated(INVALID_VALUE, name, "a stream that blocks the default one");
    if (priority > 0 || priority < -5) return INVALID_VALUE;
    Stream *it = *stream = made(STREAM, sizeof(Stream));
    it->context = context;
    it->priority = priority;
    it->sms = context->sms;
    return SUCCESS;
}
int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) { CURRENT return new_stream(__func__, stream, current(), flags, priority); }
int cuGreenCtxStreamCreate(Stream **stream, Context *green, unsigned flags, int priority) {
    INITIALIZED
    ALIVE(green, CONTEXT)
    return new_stream(__func__, stream, green, flags, priority);
}
int cuStreamDestroy(Stream *stream) {
    CURRENT
    ON(stream)
    NOT_CAPTURED(stream)
    if (stream->pending) let_go(); /* the real one lets its work end first, too */
    return gone(stream);
}
int cuStreamQuery(Stream *stream) { CURRENT ON(stream) NOT_CAPTURED(stream) SAFE return stream->pending || stream->clock > now() ? NOT_READY : SUCCESS; }
int cuStreamSynchronize(Stream *stream) { CURRENT ON(stream) NOT_CAPTURED(stream) SAFE let_go(); reach(stream->clock); return SUCCESS; }
int cuStreamGetPriority(Stream *stream, int *priority) { CURRENT ON(stream) *priority = stream->priority; return SUCCESS; }
int cuStreamGetCtx(Stream *stream, Context **context) { CURRENT ALIVE(stream, STREAM) *context = stream->context; return SUCCESS; }
int cuStreamIsCapturing(Stream *stream, int *status) { CURRENT ON(stream) *status = !stream->capture ? 0 : stream->invalid ? 2 : 1; return SUCCESS; }
int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    CURRENT
    ON(stream)
    ALIVE(event, EVENT)
    WANTED(flags == 0 || flags == 1)
    if (root(event->context) != root(stream->context)) return violated(INVALID_HANDLE, __func__, "the event is of another device's context");
    if (!stream->capture && event->captured) return violated(CAPTURE_UNSUPPORTED, __func__, "the event was recorded in a capture");
    return stream->capture ? SUCCESS : submit(stream, (Op){.what = WAIT, .target = event});
}
int cuStreamWriteValue32(Stream *stream, ptr address, uint32_t value, unsigned flags) {
    CURRENT
    ON(stream)
    WANTED(address % 4 == 0 && flags == 0)
    return submit(stream, (Op){.what = STORE, .target = (void *)address, .value = value});
}
int cuEventCreate(Event **event, unsigned flags) {
    CURRENT
    WANTED((flags & ~3u) == 0)
    Event *it = *event = made(EVENT, sizeof(Event));
    it->context = current();
    it->timed = !(flags & 2);
    return SUCCESS;
}
int cuEventDestroy(Event *event) { CURRENT ALIVE(event, EVENT) return gone(event); }
static int record(const char *name, Event *event, Stream *stream, int external) {
    if (root(event->context) != root(stream->context)) return violated(INVALID_HANDLE, name, "event and stream are of contexts of two devices");
    if (external && !stream->capture) return violated(INVALID_VALUE, name, "an external record on a stream that is not captured");
    event->recorded = 1;
    event->captured = stream->capture && !external;
    if (event->captured) return SUCCESS;
    return submit(stream, (Op){.what = RECORD, .target = event});
}
int cuEventRecord(Event *event, Stream *stream) { CURRENT ON(stream) ALIVE(event, EVENT) return record(__func__, event, stream, 0); }
int cuEventRecordWithFlags(Event *event, Stream *stream, unsigned flags) { CURRENT ON(stream) ALIVE(event, EVENT) WANTED(flags <= 1) return record(__func__, event, stream, flags); }
int cuEventQuery(Event *event) {
    CURRENT
    ALIVE(event, EVENT)
    if (event->captured) return violated(CAPTURE_UNSUPPORTED, __func__, "the event was recorded in a capture");
    SAFE
    return event->pending || event->at > now() ? NOT_READY : SUCCESS;
}
int cuEventSynchronize(Event *event) { CURRENT ALIVE(event, EVENT) SAFE let_go(); reach(event->at); return SUCCESS; }
int cuEventElapsedTime(float *milliseconds, Event *first, Event *last) {
    CURRENT
    ALIVE(first, EVENT)
    ALIVE(last, EVENT)
    if (!first->timed || !last->timed) return violated(INVALID_HANDLE, __func__, "an event without times");
    if (!first->recorded || !last->recorded) return violated(INVALID_HANDLE, __func__, "an event that was never recorded");
    if (first->pending || last->pending || first->at > now() || last->at > now()) return NOT_READY;
    *milliseconds = 1e3 * (last->at - first->at);
    return SUCCESS;
}

/* memory */

static void remember(void *address, size_t nbytes, const char *what) {
    Range *it = malloc(sizeof *it);
    *it = (Range){ranges, address, nbytes, what};
    ranges = it;
}
static int forget(const char *name, ptr address, const char *what, size_t *nbytes) {
    for (Range **at = &ranges; *at; at = &(*at)->next)
        if ((*at)->address == (char *)address && !strcmp((*at)->what, what)) {
            Range *it = *at;
            *at = it->next;
            *nbytes = it->nbytes;
            free(it);
            return SUCCESS;
        }
    return violated(INVALID_VALUE, name, "no %s memory begins there", what);
}
static int new_memory(ptr *address, size_t nbytes, const char *what) {
    if (!nbytes) return INVALID_VALUE;
    if (nbytes > MEMORY) return OUT_OF_MEMORY;
    void *it = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (it == MAP_FAILED) return OUT_OF_MEMORY;
    remember(it, nbytes, what);
    *address = (ptr)it;
    return SUCCESS;
}
static int free_memory(const char *name, ptr address, const char *what) {
    size_t nbytes;
    int status = forget(name, address, what, &nbytes);
    if (!status) munmap((void *)address, nbytes);
    return status;
}
int cuMemAlloc(ptr *address, size_t nbytes) { CURRENT SAFE return new_memory(address, nbytes, "device"); }
int cuMemFree(ptr address) { CURRENT SAFE return free_memory(__func__, address, "device"); }
int cuMemHostAlloc(ptr *address, size_t nbytes, unsigned flags) { CURRENT SAFE WANTED(flags <= 7) return new_memory(address, nbytes, "pinned"); }
int cuMemFreeHost(ptr address) { CURRENT SAFE return free_memory(__func__, address, "pinned"); }
int cuMemHostGetDevicePointer(ptr *there, ptr address, unsigned flags) { CURRENT WANTED(flags == 0) *there = address; return SUCCESS; }
int cuMemHostRegister(ptr address, size_t nbytes, unsigned flags) {
    CURRENT
    WANTED(nbytes && flags <= 15)
    for (Range *each = ranges; each; each = each->next)
        if (!strcmp(each->what, "registered") && (char *)address < each->address + each->nbytes && each->address < (char *)address + nbytes)
            return violated(INVALID_VALUE, __func__, "some of it is registered already");
    remember((void *)address, nbytes, "registered");
    return SUCCESS;
}
int cuMemHostUnregister(ptr address) { CURRENT size_t nbytes; return forget(__func__, address, "registered", &nbytes); }
static int copy(Stream *stream, ptr to, ptr from, size_t nbytes) {
    return submit(stream, (Op){.what = COPY, .target = (void *)to, .source = (void *)from, .nbytes = nbytes});
}
int cuMemcpyHtoDAsync(ptr to, ptr from, size_t nbytes, Stream *stream) { CURRENT ON(stream) return copy(stream, to, from, nbytes); }
int cuMemcpyDtoHAsync(ptr to, ptr from, size_t nbytes, Stream *stream) { CURRENT ON(stream) return copy(stream, to, from, nbytes); }
int cuMemcpyDtoDAsync(ptr to, ptr from, size_t nbytes, Stream *stream) { CURRENT ON(stream) return copy(stream, to, from, nbytes); }
int cuMemcpyHtoD(ptr to, ptr from, size_t nbytes) { CURRENT SAFE let_go(); reach(latest); memmove((void *)to, (void *)from, nbytes); return SUCCESS; }
int cuMemcpyDtoH(ptr to, ptr from, size_t nbytes) { CURRENT SAFE let_go(); reach(latest); memmove((void *)to, (void *)from, nbytes); return SUCCESS; }
int cuMemsetD32(ptr to, uint32_t value, size_t count) {
    CURRENT
    SAFE
    let_go();
    reach(latest);
    for (size_t i = 0; i < count; i++) ((uint32_t *)to)[i] = value;
    return SUCCESS;
}
int cuMemsetD32Async(ptr to, uint32_t value, size_t count, Stream *stream) {
    CURRENT
    ON(stream)
    return submit(stream, (Op){.what = FILL, .target = (void *)to, .value = value, .nbytes = count});
}

/* memory that processes share: a file in memory, mapped where it is wanted */

int cuMemGetAllocationGranularity(size_t *bytes, const void *wanted, int which) { INITIALIZED WANTED(wanted && which <= 1) *bytes = GRANULARITY; return SUCCESS; }
int cuMemCreate(Physical **handle, size_t nbytes, const void *wanted, uint64_t flags) {
    CURRENT
    WANTED(wanted && !flags && nbytes && nbytes % GRANULARITY == 0)
    int fd = memfd_create("stub-device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, nbytes)) return OUT_OF_MEMORY;
    Physical *it = *handle = made(PHYSICAL, sizeof(Physical));
    it->fd = fd;
    it->nbytes = nbytes;
    return SUCCESS;
}
int cuMemRelease(Physical *handle) { INITIALIZED ALIVE(handle, PHYSICAL) close(handle->fd); return gone(handle); }
int cuMemExportToShareableHandle(int *fd, Physical *handle, int type, uint64_t flags) {
    INITIALIZED
    ALIVE(handle, PHYSICAL)
    WANTED(type == 1 && !flags)
    *fd = dup(handle->fd);
    return SUCCESS;
}
int cuMemImportFromShareableHandle(Physical **handle, void *fd, int type) {
    CURRENT
    WANTED(type == 1)
    Physical *it = *handle = made(PHYSICAL, sizeof(Physical));
    it->fd = dup((int)(intptr_t)fd);
    it->nbytes = lseek(it->fd, 0, SEEK_END);
    return SUCCESS;
}
int cuMemAddressReserve(ptr *address, size_t nbytes, size_t align, ptr hint, uint64_t flags) {
    INITIALIZED
    WANTED(nbytes % GRANULARITY == 0 && !align && !flags)
    void *it = mmap((void *)hint, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (it == MAP_FAILED) return OUT_OF_MEMORY;
    *address = (ptr)it;
    return SUCCESS;
}
int cuMemAddressFree(ptr address, size_t nbytes) { INITIALIZED return munmap((void *)address, nbytes) ? INVALID_VALUE : SUCCESS; }
int cuMemMap(ptr address, size_t nbytes, size_t offset, Physical *handle, uint64_t flags) {
    INITIALIZED
    ALIVE(handle, PHYSICAL)
    WANTED(!offset && !flags && nbytes <= handle->nbytes)
    return mmap((void *)address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, 0) == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}
int cuMemSetAccess(ptr address, size_t nbytes, const void *access, size_t count) {
    INITIALIZED
    WANTED(access && count == 1)
    return mprotect((void *)address, nbytes, PROT_READ | PROT_WRITE) ? INVALID_VALUE : SUCCESS;
}
int cuMemUnmap(ptr address, size_t nbytes) {
    INITIALIZED
    void *it = mmap((void *)address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return it == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

/* kernels */

int cuLibraryLoadData(void **library, const void *code, const void *a, const void *b, unsigned c, const void *d, const void *e, unsigned f) {
    INITIALIZED
    (void)a, (void)b, (void)d, (void)e;
    WANTED(code && !c && !f)
    *library = made(MODULE, sizeof(Kind));
    return SUCCESS;
}
int cuLibraryGetKernel(Kernel **kernel, void *library, const char *name) {
    INITIALIZED
    ALIVE(library, MODULE)
    Kernel *it = *kernel = made(KERNEL, sizeof(Kernel));
    it->moves = !strcmp(name, "move");
    return SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel *kernel, int threads, size_t shared) {
    CURRENT
    ALIVE(kernel, KERNEL)
    WANTED(threads == 1024 && !shared)
    *blocks = BLOCKS_PER_SM;
    return SUCCESS;
}
int cuLaunchKernel(Kernel *kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream *stream,
                   void **arguments, void **extra) {
    CURRENT
    ALIVE(kernel, KERNEL)
    ON(stream)
    WANTED(x && y == 1 && z == 1 && bx && by == 1 && bz == 1 && !shared && arguments && !extra)
    if (kernel->moves) {
        double seconds = 16 * *(uint64_t *)arguments[2] / 2e12;
        return submit(stream, (Op){.what = SPIN, .seconds = seconds});
    }
    unsigned wave = BLOCKS_PER_SM * stream->sms, waves = (x + wave - 1) / wave;
    return submit(stream, (Op){.what = SPIN, .seconds = waves * *(uint64_t *)arguments[0] / CYCLES_PER_S, .target = *(void **)arguments[1]});
}

/* graphs */

int cuStreamBeginCapture(Stream *stream, int mode) {
    CURRENT
    ON(stream)
    WANTED(mode >= 0 && mode <= 2)
    if (stream->capture) return violated(ILLEGAL_STATE, __func__, "the stream is captured already");
    int i = 0;
    while (capturing[i]) i++;
    capturing[i] = stream;
    stream->capture = made(GRAPH, sizeof(Graph));
    stream->mode = mode;
    stream->invalid = 0;
    stream->thread = self();
    return SUCCESS;
}
int cuStreamEndCapture(Stream *stream, Graph **graph) {
    CURRENT
    ON(stream)
    *graph = NULL;
    if (!stream->capture) return violated(ILLEGAL_STATE, __func__, "the stream is not captured");
    if (stream->mode != 2 && stream->thread != self()) return violated(CAPTURE_WRONG_THREAD, __func__, "by another thread than began it");
    for (int i = 0; i < 64; i++) if (capturing[i] == stream) capturing[i] = NULL;
    Graph *it = stream->capture;
    stream->capture = NULL;
    if (stream->invalid) { gone(it); return CAPTURE_INVALIDATED; }
    *graph = it;
    return SUCCESS;
}
int cuGraphCreate(Graph **graph, unsigned flags) { INITIALIZED WANTED(!flags) *graph = made(GRAPH, sizeof(Graph)); return SUCCESS; }
int cuGraphGetNodes(Graph *graph, void **nodes, size_t *count) {
    INITIALIZED
    ALIVE(graph, GRAPH)
    if (nodes) for (size_t i = 0; i < *count && i < (size_t)graph->nodes; i++) nodes[i] = graph + i;
    else *count = graph->nodes;
    return SUCCESS;
}
int cuGraphInstantiate(Graph **exec, Graph *graph, uint64_t flags) {
    CURRENT
    ALIVE(graph, GRAPH)
    WANTED((flags & ~15ull) == 0)
    Graph *it = *exec = made(EXEC, sizeof(Graph));
    it->nodes = graph->nodes;
    Op **end = &it->ops;
    for (Op *each = graph->ops; each; each = each->next, end = &(*end)->next) {
        *end = memcpy(malloc(sizeof *each), each, sizeof *each);
        (*end)->next = NULL;
    }
    return SUCCESS;
}
int cuGraphUpload(Graph *exec, Stream *stream) { CURRENT ALIVE(exec, EXEC) ON(stream) NOT_CAPTURED(stream) return SUCCESS; }
int cuGraphLaunch(Graph *exec, Stream *stream) { CURRENT ALIVE(exec, EXEC) ON(stream) NOT_CAPTURED(stream) return submit(stream, (Op){.what = LAUNCH, .target = exec}); }
int cuGraphExecDestroy(Graph *exec) { INITIALIZED ALIVE(exec, EXEC) let_go(); return gone(exec); }
int cuGraphDestroy(Graph *graph) { INITIALIZED ALIVE(graph, GRAPH) return gone(graph); }

/* green contexts */

static int sms_of(const char *resource) { int count; memcpy(&count, resource + SM_COUNT_AT, sizeof count); return count; }
static void resource_of(char *resource, int type, int sms) {
    memset(resource, 0, RESOURCE_BYTES);
    memcpy(resource, &type, sizeof type);
    memcpy(resource + SM_COUNT_AT, &sms, sizeof sms);
}
int cuDeviceGetDevResource(int device, char *resource, int type) {
    INITIALIZED
    WANTED(device == 0)
    resource_of(resource, type, type == 1 ? SMS : 0);
    return SUCCESS;
}
int cuDevSmResourceSplitByCount(char *groups, unsigned *count, const char *whole, char *rest, unsigned flags, unsigned least) {
    INITIALIZED
    int has = (least + 7) / 8 * 8, all = sms_of(whole);
    WANTED(count && !flags && has && has <= all)
    if (*count > (unsigned)(all / has) || !groups) *count = all / has;
    for (unsigned i = 0; groups && i < *count; i++) resource_of(groups + i * RESOURCE_BYTES, 1, has);
    if (rest) resource_of(rest, 1, all - *count * has);
    return SUCCESS;
}
int cuDevResourceGenerateDesc(Resource **description, const char *resources, unsigned count) {
    INITIALIZED
    WANTED(count)
    Resource *it = *description = made(RESOURCE, sizeof(Resource));
    for (unsigned i = 0; i < count; i++) it->sms += sms_of(resources + i * RESOURCE_BYTES);
    return SUCCESS;
}
int cuGreenCtxCreate(Context **green, Resource *description, int device, unsigned flags) {
    INITIALIZED
    ALIVE(description, RESOURCE)
    WANTED(device == 0 && flags == 1)
    Context *it = *green = made(CONTEXT, sizeof(Context));
    it->green = 1;
    it->sms = description->sms;
    return SUCCESS;
}
int cuCtxFromGreenCtx(Context **context, Context *green) { INITIALIZED ALIVE(green, CONTEXT) *context = green; return SUCCESS; }
int cuGreenCtxDestroy(Context *green) {
    INITIALIZED
    ALIVE(green, CONTEXT)
    if (green->thread) return violated(INVALID_CONTEXT, __func__, "it is current in a thread");
    return gone(green);
}
int cuGreenCtxRecordEvent(Context *green, Event *event) { INITIALIZED ALIVE(green, CONTEXT) ALIVE(event, EVENT) event->recorded = 1; event->at = now(); return SUCCESS; }

/* ---- by name */

int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
int cuGetProcAddress(const char *, void **, int, uint64_t, int *);
#define F(name) {#name, (void *)name}
static const struct { const char *name; void *function; } FUNCTIONS[] = {
    F(cuGetErrorName), F(cuGetErrorString), F(cuInit), F(cuDriverGetVersion), F(cuDeviceGetCount), F(cuDeviceGet), F(cuDeviceGetName),
    F(cuDeviceTotalMem), F(cuDeviceGetAttribute), F(cuDevicePrimaryCtxRetain), F(cuDevicePrimaryCtxRelease), F(cuCtxSetCurrent), F(cuCtxGetCurrent),
    F(cuCtxPushCurrent), F(cuCtxPopCurrent), F(cuCtxGetDevice), F(cuCtxSynchronize), F(cuCtxGetStreamPriorityRange), F(cuMemGetInfo),
    F(cuStreamCreateWithPriority), F(cuStreamDestroy), F(cuStreamQuery), F(cuStreamSynchronize), F(cuStreamGetPriority), F(cuStreamGetCtx),
    F(cuStreamIsCapturing), F(cuStreamWaitEvent), F(cuStreamWriteValue32), F(cuStreamBeginCapture), F(cuStreamEndCapture), F(cuEventCreate),
    F(cuEventDestroy), F(cuEventRecord), F(cuEventRecordWithFlags), F(cuEventQuery), F(cuEventSynchronize), F(cuEventElapsedTime), F(cuMemAlloc),
    F(cuMemFree), F(cuMemHostAlloc), F(cuMemFreeHost), F(cuMemHostGetDevicePointer), F(cuMemHostRegister), F(cuMemHostUnregister),
    F(cuMemcpyHtoDAsync), F(cuMemcpyDtoHAsync), F(cuMemcpyDtoDAsync), F(cuMemcpyHtoD), F(cuMemcpyDtoH), F(cuMemsetD32), F(cuMemsetD32Async),
    F(cuMemGetAllocationGranularity), F(cuMemCreate), F(cuMemRelease), F(cuMemExportToShareableHandle), F(cuMemImportFromShareableHandle),
    F(cuMemAddressReserve), F(cuMemAddressFree), F(cuMemMap), F(cuMemSetAccess), F(cuMemUnmap), F(cuLibraryLoadData), F(cuLibraryGetKernel),
    F(cuOccupancyMaxActiveBlocksPerMultiprocessor), F(cuLaunchKernel), F(cuGraphCreate), F(cuGraphGetNodes), F(cuGraphInstantiate), F(cuGraphUpload),
    F(cuGraphLaunch), F(cuGraphExecDestroy), F(cuGraphDestroy), F(cuDeviceGetDevResource), F(cuDevSmResourceSplitByCount),
    F(cuDevResourceGenerateDesc), F(cuGreenCtxCreate), F(cuGreenCtxStreamCreate), F(cuGreenCtxDestroy), F(cuGreenCtxRecordEvent), F(cuCtxFromGreenCtx),
    F(cuGetProcAddress),
};
static void *by_name(const char *name) {
    if (!strcmp(name, "cuGraphInstantiateWithFlags")) name = "cuGraphInstantiate";
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++) if (!strcmp(FUNCTIONS[i].name, name)) return FUNCTIONS[i].function;
    return NULL;
}
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    *function = by_name(symbol);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    return cuGetProcAddress_v2(symbol, function, version, flags, status);
}

/* The names under which callers that look symbols up by hand find what the headers rename. */
#define ALIAS(name, of, arguments) int name arguments __attribute__((alias(#of)))
ALIAS(cuStreamDestroy_v2, cuStreamDestroy, (Stream *));
ALIAS(cuEventDestroy_v2, cuEventDestroy, (Event *));
ALIAS(cuEventElapsedTime_v2, cuEventElapsedTime, (float *, Event *, Event *));
ALIAS(cuStreamWriteValue32_v2, cuStreamWriteValue32, (Stream *, ptr, uint32_t, unsigned));
ALIAS(cuStreamBeginCapture_v2, cuStreamBeginCapture, (Stream *, int));
ALIAS(cuGraphInstantiateWithFlags, cuGraphInstantiate, (Graph **, Graph *, uint64_t));
ALIAS(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync, (ptr, ptr, size_t, Stream *));
ALIAS(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync, (ptr, ptr, size_t, Stream *));
ALIAS(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync, (ptr, ptr, size_t, Stream *));
