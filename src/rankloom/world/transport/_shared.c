/* Collectives between processes that map the same memory. Plain C without torch: it takes pointers and byte counts.
 *
 * One segment per group, the same bytes in every rank's address space:
 *
 *     Control      epoch (the last finished rendezvous), arrivals, which rank broke the group and why
 *     Rank[p]      what each rank is doing: how often it arrived, its call (two descriptors, used in turns)
 *     lens[p]      per descriptor, the bytes that this rank has for each other rank, and that it expects from each
 *     slots[p]     staging slots of each rank, used in turns, and as many result slots
 *     rings[p][p]  one byte ring for every sender and receiver
 *
 * A collective is a sequence of windows. In each, every rank copies a cache-sized piece of its input into its slot, all meet
 * (one rendezvous), and every rank copies what it needs from the others' slots, adding in rank order where values are
 * reduced. Slots are used in turns, so that one meeting per window is enough: a rank that writes slot i again has met all others
 * since they read it. Two suffice. If each rank has its own core, more are used (as many as fill STAGING), so that a slot has left
 * its readers' caches before it is rewritten: writing a line that another core caches is 4x slower (9 instead of 40 GB/s on Zen 4).
 * Rings are long for the same reason. Inputs in a shared region are not staged at all, but read in place.
 *
 * Waiting spins for a moment, then sleeps on a futex; it never holds the GIL. A sleeper wakes every SLICE_MS to check whether
 * the ranks it waits for still live. Once the group is broken (a rank died, left, timed out, aborted or made another call),
 * every wait in every rank ends with the same reason.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define RELAX() __builtin_ia32_pause()
#else
#define FAST
#define RELAX() atomic_signal_fence(memory_order_seq_cst)
#endif
#define INDEPENDENT _Pragma("GCC ivdep")   /* outputs alias inputs exactly or not at all */

enum { MAX_RANKS = 256, SLICE_MS = 50, PATIENCE_US = 300, LINE = 64 };
enum { STAGING = 2 << 20 };         /* bytes of all staging slots of a rank: two second-level caches; half as many for results */
enum { TINY = 16 << 10 };           /* bytes up to which a copy is cheaper than a second rendezvous */
enum { BLOCK = 8 << 10 };           /* bytes reduced at a time: they stay in the first-level cache */
enum { LARGE = 8 << 20 };           /* bytes of a result from which on the caches should not keep it */
enum { PIECE = 32 << 10 };          /* bytes of a message moved at a time: one piece is read while the next is written */
enum { MEASURED = 16 << 10 };       /* bytes from which on the speed of a write is measured */
enum { SLOW = 4 };                  /* GB/s; a write within one third-level cache reaches 9 to 40, from one cache to another 2.3 (Zen 4) */
enum { CERTAIN = 4, TRUST = 128 };  /* slow writes in a row until others bypass the caches, and how many do before the next measurement */

/* ------------------------------------------------------------------ the contents of the shared segment */

enum Kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, REDUCE_SCATTER, SCATTER, ALL_TO_ALL, BARRIER };
enum Why { FINE, LOST, LEFT, ABORTED, TIMED_OUT, MISMATCHED, WRONG_LENGTH, INTERRUPTED, FORKED, DAMAGED, NO_MEMORY };

typedef struct {
    uint32_t kind, dtype, op, root;
    uint32_t region, pad;           /* of the input, 1 to 63; 0: private memory */
    uint64_t offset;                /* of the input, in its region */
    uint64_t known;                 /* one bit for each region that this rank maps */
    uint64_t nbytes;                /* of one lane; the same on all ranks where values are combined or copied to all */
    uint64_t longest;               /* length of this rank's lanes */
} Descriptor;

typedef struct {
    _Alignas(LINE) _Atomic uint32_t epoch, sleepers;
    _Alignas(LINE) _Atomic uint32_t arrivals;
    _Alignas(LINE) _Atomic uint32_t broken;   /* why << 16 | the rank to blame; 0: not broken */
} Control;

typedef struct {
    _Alignas(LINE) _Atomic uint32_t arrived, left;
    _Atomic int64_t pid;
    int64_t started;
    _Alignas(LINE) _Atomic uint32_t bell, listeners;   /* for messages between two ranks */
    _Alignas(LINE) Descriptor said[2];
} Rank;

typedef struct {
    _Alignas(LINE) _Atomic uint64_t written;
    _Alignas(LINE) _Atomic uint64_t read;
    _Alignas(LINE) char bytes[];
} Ring;

/* The size of a message: its bytes, and in the highest byte its number type, so that one comparison finds both. */
enum { NUMBER_AT = 56 };
static uint64_t bytes_of(uint64_t size) { return size & ((UINT64_C(1) << NUMBER_AT) - 1); }
static int is_possible(uint64_t size) { return size >> NUMBER_AT < 12 && bytes_of(size) < UINT64_C(1) << 48; }   /* of addresses */

typedef struct { int64_t tag; uint64_t size; } Envelope;

/* ------------------------------------------------------------------ what this process knows */

typedef struct Op {
    struct Op *next;
    uint64_t ticket;
    int kind, dtype, op, root;
    uintptr_t in, out;              /* 0 if the table holds absolute addresses */
    uint64_t nbytes;                /* of one lane, if all are equal */
    uint64_t *table;                /* else four rows of p: offset and length, in and out */
    double timeout;
} Op;

typedef struct Message {
    struct Message *next;
    uint64_t moved, size;
    int64_t tag;
    int peer, sending, started, orphan;   /* peer -1: any rank, until a message has come */
    _Atomic int done;
    char *at;
} Message;

typedef struct Early {              /* a message that came before anyone asked for its tag */
    struct Early *next;
    int peer, whole;
    Envelope head;
    char bytes[];
} Early;

typedef struct {                    /* the message that is being read from one ring */
    int busy;
    Envelope head;
    uint64_t moved;
    Message *message;               /* where it goes, or else: */
    Early *early;
} Incoming;

typedef struct { uint32_t id; char *base; uint64_t stride; } Region;

typedef struct { int slow, past; } Path;   /* to the ranks that read it: slow writes in a row, how many more bypass the caches */

typedef struct {
    PyObject_HEAD
    char *base;
    int rank, ranks, spin_us, yields, generation;
    uint64_t window;                /* bytes staged at a time */
    uint32_t turns;                 /* number of slots, a power of two, as the number of meetings wraps around */
    uint32_t meetings;              /* rendezvous so far */
    Path to_all, *to;               /* of slots; of the ring to each rank */
    Region *regions;
    int region_count;
    pthread_mutex_t lock;           /* guards the queue of collectives */
    pthread_cond_t changed;         /* a turn has ended */
    pthread_cond_t given;           /* there is work for the worker */
    int waiting;                    /* threads that wait for `changed` */
    Op *first, *last;
    uint64_t issued;
    _Atomic uint64_t finished;
    uint64_t failed;                /* the first ticket whose collective did not succeed */
    int running, has_worker;
    _Atomic int closing;            /* this rank has left */
    pthread_t worker;
    pthread_mutex_t post;           /* guards the messages */
    pthread_cond_t posted;
    Message *messages;
    Early *early;
    Incoming *incoming;
    int has_postman;
    pthread_t postman;
} Link;

typedef struct {                    /* one blocking call */
    PyThreadState **state;          /* to check for signals; NULL in our own threads */
    double deadline;
    int spin_us, patient;           /* patient: after the deadline, the call goes on without this wait */
} Wait;

static _Atomic int forks;           /* a forked child must not use its parent's links */
static void count_fork(void) { atomic_fetch_add(&forks, 1); }
static int is_forked(Link *l) { return l->generation != atomic_load(&forks); }

/* memcpy that allows NULL for 0 bytes: an empty tensor has that address. */
static void copy(char *to, const char *from, uint64_t n)
{
    if (n)
        memcpy(to, from, n);
}

/* Bypasses the caches, which would first read what is then overwritten: for results too large to stay in them. */
static void copy_past(char *to, const char *from, uint64_t n)
{
#ifdef __SSE2__
    uint64_t head = -(uintptr_t)to % LINE;
    if (n >= 2 * LINE) {
        copy(to, from, head);
        for (to += head, from += head, n -= head; n >= LINE; to += LINE, from += LINE, n -= LINE)
            for (int i = 0; i < LINE; i += 16)
                _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        _mm_sfence();   /* before others are told that the data is there */
    }
#endif
    copy(to, from, n);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Write to memory that others read. If their third-level cache is another one, lines that they hold are fetched back one by one, and
 * bypassing the caches is four to ten times faster; if it is the same, bypassing takes half as long again. The system has no number
 * that tells which it is, and ranks move between cores. So the speed of the writes decides. */
static void publish(Path *path, char *to, const char *from, uint64_t n)
{
    if (n < MEASURED) {
        copy(to, from, n);
    } else if (path->past) {
        path->past--;
        copy_past(to, from, n);
    } else {
        double begin = now();
        copy(to, from, n);
        int is_slow = n < (now() - begin) * 1e9 * SLOW;   /* a single slow write may be due to an interrupt */
        path->slow = !is_slow ? 0 : path->slow < CERTAIN ? path->slow + 1 : CERTAIN;
        path->past = path->slow == CERTAIN ? TRUST : 0;
    }
}

/* ------------------------------------------------------------------ addresses */

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
static uint64_t lens_at(int p) { return sizeof(Control) + p * sizeof(Rank); }
static uint64_t slots_at(int p) { return round_up(lens_at(p) + 4 * sizeof(uint64_t) * p * p, 4096); }
static uint64_t rings_at(int p) { return slots_at(p) + (uint64_t)p * (STAGING + STAGING / 2); }

static uint64_t ring_size(int p) { return p <= 8 ? 1 << 20 : p <= 32 ? 64 << 10 : 16 << 10; }
static uint64_t ring_stride(int p) { return sizeof(Ring) + ring_size(p); }
static uint64_t segment_size(int p) { return rings_at(p) + (uint64_t)p * p * ring_stride(p); }

static Control *control(Link *l) { return (Control *)l->base; }
static Rank *rank_of(Link *l, int r) { return (Rank *)(l->base + sizeof(Control)) + r; }
static uint64_t *lens_of(Link *l, int r, int turn) { return (uint64_t *)(l->base + lens_at(l->ranks)) + ((uint64_t)turn * l->ranks + r) * 2 * l->ranks; }
static uint64_t *expected_by(Link *l, int r, int turn) { return lens_of(l, r, turn) + l->ranks; }
static char *slots_of(Link *l, int r) { return l->base + slots_at(l->ranks) + (uint64_t)r * (STAGING + STAGING / 2); }
static char *slot_of(Link *l, int r, uint32_t meeting) { return slots_of(l, r) + meeting % l->turns * (STAGING / l->turns); }
static char *result_of(Link *l, int r, uint32_t meeting) { return slots_of(l, r) + STAGING + meeting % l->turns * (STAGING / 2 / l->turns); }
static Ring *ring_of(Link *l, int from, int to)
{
    return (Ring *)(l->base + rings_at(l->ranks) + ((uint64_t)from * l->ranks + to) * ring_stride(l->ranks));
}

/* ------------------------------------------------------------------ waiting */

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static void futex_sleep(_Atomic uint32_t *word, uint32_t seen, double seconds)
{
    struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

static void ring_bell(Rank *r)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&r->listeners, memory_order_relaxed)) {
        atomic_fetch_add(&r->bell, 1);
        futex_wake(&r->bell);
    }
}

/* Every rank looks again at what it waits for. */
static void wake_all(Link *l)
{
    for (int r = 0; r < l->ranks; r++) {
        atomic_fetch_add(&rank_of(l, r)->bell, 1);
        futex_wake(&rank_of(l, r)->bell);
    }
    futex_wake(&control(l)->epoch);
}

static int why_broken(Link *l) { return (int)(atomic_load(&control(l)->broken) >> 16); }

/* Break the group for all ranks. Returns the reason that counts: the first. */
static int break_group(Link *l, int blamed, int why)
{
    uint32_t whole = 0;
    atomic_compare_exchange_strong(&control(l)->broken, &whole, (uint32_t)why << 16 | (uint32_t)blamed);
    wake_all(l);
    return why_broken(l);
}

/* The state letter of a process and its start time, from /proc; the letter is 0 if there is no such process. If this process may open no
 * more files, the letter is - for a process that exists, and the time 0: not known. */
static char process_state(int64_t pid, int64_t *started)
{
    char path[40], text[1024], *at;
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    *started = 0;
    if (n <= 0)
        return kill((pid_t)pid, 0) && errno == ESRCH ? 0 : '-';
    text[n] = 0;
    if (!(at = strrchr(text, ')')))   /* the process name before it may contain anything */
        return 0;
    char state = at[2];
    at += 2;
    for (int field = 3; field < 22 && at; field++)
        at = strchr(at + 1, ' ');
    *started = at ? strtoll(at, NULL, 10) : 0;
    return state;
}

/* L: it has left the group; ?: it has not come yet; X: its process has ended; else the letter of `process_state`. */
static char letter_of(Rank *r)
{
    int64_t started = 0;
    if (atomic_load(&r->left))
        return 'L';
    if (!r->pid)
        return '?';
    char state = process_state(r->pid, &started);
    int is_another = started && r->started && started != r->started;
    return !state || state == 'Z' || is_another ? 'X' : state;
}

/* Whether a signal handler has raised; only the main thread runs handlers. */
static int interrupted(Wait *w)
{
    if (!w->state)
        return 0;
    PyEval_RestoreThread(*w->state);
    int raised = PyErr_CheckSignals();
    *w->state = PyEval_SaveThread();
    return raised != 0;
}

/* Whether a rank that this call needs is gone: LOST, LEFT or FINE. Afterwards, look again for what it did before it was gone. */
static int why_gone(Rank *r)
{
    char letter = letter_of(r);
    return letter == 'L' ? LEFT : letter == 'X' ? LOST : FINE;
}

/* Seconds to sleep before the next check of those that are waited for. */
static double slice(const Wait *w)
{
    double left = w->deadline - now(), most = 1e-3 * SLICE_MS;
    return left <= 0 ? 0 : left > most ? most : left;
}

/* Called between two sleeps. `missing`: a rank without which this call cannot end, or -1; `gone`: why that rank will not come. */
static int still_worth_waiting(Link *l, Wait *w, int missing, int gone)
{
    int why = why_broken(l);
    if (why)
        return why;
    if (l->closing)
        return LEFT;
    if (interrupted(w))
        return break_group(l, l->rank, INTERRUPTED);
    if (gone)
        return break_group(l, missing, gone);
    if (now() > w->deadline)
        return w->patient ? TIMED_OUT : break_group(l, missing >= 0 ? missing : l->rank, TIMED_OUT);
    return FINE;
}

static int has_met(Link *l, uint32_t meeting) { return (int32_t)(atomic_load(&control(l)->epoch) - meeting) >= 0; }

static int spin_until_met(Link *l, uint32_t meeting, Wait *w)
{
    for (int i = 0; i < l->yields; i++) {   /* more ranks than cores: let the others run, as this rank waits for them */
        if (has_met(l, meeting))
            return 1;
        sched_yield();
    }
    double end = now() + 1e-6 * w->spin_us;
    do {
        for (int i = 0; i < 64; i++) {
            if (has_met(l, meeting))
                return 1;
            RELAX();
        }
    } while (now() < end);
    return has_met(l, meeting);
}

/* The rank that keeps this meeting from ending: one that is gone, else one that has not come yet, else -1. A rank that has come
 * may have left the group, but its process cannot have ended normally: it would still be waiting here. */
static int find_missing(Link *l, uint32_t meeting, int *gone)
{
    int late = -1;
    for (int r = 0; r < l->ranks; r++) {
        Rank *other = rank_of(l, r);
        int has_come = (int32_t)(atomic_load(&other->arrived) - meeting) >= 0, why = why_gone(other);
        if ((*gone = why == LEFT && has_come ? FINE : why))
            return r;
        late = late < 0 && !has_come ? r : late;
    }
    return late;
}

/* Wait until all ranks have come here. */
static int rendezvous(Link *l, Wait *w)
{
    Control *c = control(l);
    uint32_t meeting = ++l->meetings;
    atomic_store_explicit(&rank_of(l, l->rank)->arrived, meeting, memory_order_release);
    if (atomic_fetch_add(&c->arrivals, 1) + 1 == meeting * (uint32_t)l->ranks) {
        atomic_store(&c->epoch, meeting);
        if (atomic_load(&c->sleepers))
            futex_wake(&c->epoch);
        return FINE;
    }
    if (spin_until_met(l, meeting, w))
        return FINE;
    int why = FINE;
    atomic_fetch_add(&c->sleepers, 1);
    while (!why && !has_met(l, meeting)) {
        futex_sleep(&c->epoch, meeting - 1, slice(w));
        int gone, missing = find_missing(l, meeting, &gone);
        if (!has_met(l, meeting))   /* after the check: a rank that is gone now may have come before */
            why = still_worth_waiting(l, w, missing, gone);
    }
    atomic_fetch_sub(&c->sleepers, 1);
    return has_met(l, meeting) ? FINE : why;
}

/* ------------------------------------------------------------------ arithmetic */

enum Dtype { F32, F64, F16, BF16, I8, U8, I16, U16, I32, U32, I64, U64 };
enum Reduce { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR };
static const int SIZE[] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8};

#define EACH(expression) INDEPENDENT for (size_t i = 0; i < n; i++) out[i] = (expression)
#define ARITHMETIC(T, W)                                                                  \
    case SUM: case AVG: EACH((T)((W)a[i] + (W)b[i])); break;                              \
    case PRODUCT: EACH((T)((W)a[i] * (W)b[i])); break;                                    \
    case MIN: EACH(a[i] < b[i] || a[i] != a[i] ? a[i] : b[i]); break;   /* NaN wins */    \
    case MAX: EACH(a[i] > b[i] || a[i] != a[i] ? a[i] : b[i]); break;
#define FLOATS(T)                                                                         \
    FAST static void join_##T(int op, T *out, const T *a, const T *b, size_t n)           \
    {                                                                                     \
        switch (op) { ARITHMETIC(T, T) }                                                  \
    }                                                                                     \
    FAST static void add_both_##T(T *a, T *b, size_t n)   /* both become the sum */       \
    {                                                                                     \
        INDEPENDENT for (size_t i = 0; i < n; i++) { T sum = a[i] + b[i]; a[i] = sum; b[i] = sum; } \
    }
/* Sums and products of integers wrap around, so they are computed as unsigned numbers. */
#define INTEGERS(T, W)                                                                    \
    FAST static void join_##T(int op, T *out, const T *a, const T *b, size_t n)           \
    {                                                                                     \
        switch (op) {                                                                     \
            ARITHMETIC(T, W)                                                              \
            case BAND: EACH(a[i] & b[i]); break;                                          \
            case BOR: EACH(a[i] | b[i]); break;                                           \
            case BXOR: EACH(a[i] ^ b[i]); break;                                          \
        }                                                                                 \
    }
FLOATS(float)
FLOATS(double)
INTEGERS(int8_t, uint32_t)
INTEGERS(uint8_t, uint32_t)
INTEGERS(int16_t, uint32_t)
INTEGERS(uint16_t, uint32_t)
INTEGERS(int32_t, uint32_t)
INTEGERS(uint32_t, uint32_t)
INTEGERS(int64_t, uint64_t)
INTEGERS(uint64_t, uint64_t)

FAST static void divide_float(float *out, float by, size_t n) { INDEPENDENT for (size_t i = 0; i < n; i++) out[i] /= by; }
FAST static void divide_double(double *out, double by, size_t n) { INDEPENDENT for (size_t i = 0; i < n; i++) out[i] /= by; }

FAST static void widen_bf16(float *out, const uint16_t *in, size_t n)
{
    uint32_t *bits = (uint32_t *)out;
    for (size_t i = 0; i < n; i++)
        bits[i] = (uint32_t)in[i] << 16;
}

FAST static void narrow_bf16(uint16_t *out, const float *in, size_t n)   /* round to nearest, ties to even; NaN stays NaN */
{
    const uint32_t *bits = (const uint32_t *)in;
    for (size_t i = 0; i < n; i++) {
        uint32_t u = bits[i], rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

FAST static void widen_f16(float *out, const _Float16 *in, size_t n) { for (size_t i = 0; i < n; i++) out[i] = (float)in[i]; }
FAST static void narrow_f16(_Float16 *out, const float *in, size_t n) { for (size_t i = 0; i < n; i++) out[i] = (_Float16)in[i]; }

static void join(int dtype, int op, void *out, const void *a, const void *b, size_t n)
{
    switch (dtype) {
    case F32: join_float(op, out, a, b, n); break;
    case F64: join_double(op, out, a, b, n); break;
    case I8: join_int8_t(op, out, a, b, n); break;
    case U8: join_uint8_t(op, out, a, b, n); break;
    case I16: join_int16_t(op, out, a, b, n); break;
    case U16: join_uint16_t(op, out, a, b, n); break;
    case I32: join_int32_t(op, out, a, b, n); break;
    case U32: join_uint32_t(op, out, a, b, n); break;
    case I64: join_int64_t(op, out, a, b, n); break;
    case U64: join_uint64_t(op, out, a, b, n); break;
    }
}

static void reduce_halves(int dtype, int op, char *out, const char **in, int p, size_t n)
{
    float sum[BLOCK / 2], next[BLOCK / 2];
    for (int r = 0; r < p; r++) {
        float *into = r ? next : sum;
        dtype == BF16 ? widen_bf16(into, (const uint16_t *)in[r], n) : widen_f16(into, (const _Float16 *)in[r], n);
        if (r)
            join_float(op, sum, sum, next, n);
    }
    if (op == AVG)
        divide_float(sum, (float)p, n);
    dtype == BF16 ? narrow_bf16((uint16_t *)out, sum, n) : narrow_f16((_Float16 *)out, sum, n);
}

static void reduce_block(int dtype, int op, char *out, const char **in, int p, size_t n)
{
    char sum[BLOCK];
    if (dtype == F16 || dtype == BF16) {
        reduce_halves(dtype, op, out, in, p, n);
        return;
    }
    if (p == 1)
        memmove(out, in[0], n * SIZE[dtype]);
    for (int r = 1; r < p; r++)   /* the output may be one of the inputs, so it is written last */
        join(dtype, op, r == p - 1 ? out : sum, r == 1 ? in[0] : sum, in[r], n);
    if (op == AVG && dtype == F32)
        divide_float((float *)out, (float)p, n);
    if (op == AVG && dtype == F64)
        divide_double((double *)out, (double)p, n);
}

/* out = in[0] op in[1] op ... in this order, 16-bit floats in fp32 with one rounding. in: p addresses, which are advanced. */
static void reduce(int dtype, int op, char *out, const char **in, int p, uint64_t nbytes)
{
    while (nbytes) {
        uint64_t piece = nbytes < BLOCK ? nbytes : BLOCK;
        reduce_block(dtype, op, out, in, p, piece / SIZE[dtype]);
        out += piece;
        nbytes -= piece;
        for (int r = 0; r < p; r++)
            in[r] += piece;
    }
}

/* ------------------------------------------------------------------ one collective */

typedef struct {
    int lanes;                      /* 1: the same for everyone; p: one for each rank */
    int publishes, takes;           /* takes: from no rank, from the root only, or from all */
    int reduces, in_shares;
    int is_large;                   /* the result of a gather, all of which is written and none of it read before */
    uint64_t in_at[MAX_RANKS], in_len[MAX_RANKS], out_at[MAX_RANKS], out_len[MAX_RANKS];
} Plan;
enum { NONE, ROOT, ALL };

static int publishes(int kind, int root, int r) { return (kind != BROADCAST && kind != SCATTER) || root == r; }

static int takes(int kind, int root, int r) { return kind == BROADCAST || kind == SCATTER ? ROOT : (kind == REDUCE || kind == GATHER) && root != r ? NONE : ALL; }

/* Kinds in which each pair of ranks may have another length. */
static int has_own_lengths(int kind) { return kind == ALL_GATHER || kind == GATHER || kind == SCATTER || kind == ALL_TO_ALL || kind == REDUCE_SCATTER; }

static uint64_t part(uint64_t length, uint64_t from, uint64_t most)
{
    return from >= length ? 0 : length - from < most ? length - from : most;
}

static uint64_t share_of(Link *l, uint64_t nbytes) { return round_up((nbytes + l->ranks - 1) / l->ranks, LINE); }

/* Large all-reduce of more than two ranks: lane d is the d-th share of the input, which rank d adds up. */
static void plan_shares(Link *l, const Op *op, Plan *plan)
{
    uint64_t share = share_of(l, op->nbytes);
    plan->lanes = l->ranks;
    for (int d = 0; d < l->ranks; d++) {
        plan->in_at[d] = d * share < op->nbytes ? d * share : op->nbytes;
        plan->in_len[d] = part(op->nbytes, d * share, share);
        plan->out_len[d] = part(op->nbytes, l->rank * share, share);
    }
}

static void make_plan(Link *l, const Op *op, Plan *plan)
{
    int p = l->ranks, k = op->kind;
    plan->lanes = k == REDUCE_SCATTER || k == SCATTER || k == ALL_TO_ALL ? p : 1;
    plan->publishes = publishes(k, op->root, l->rank);
    plan->takes = takes(k, op->root, l->rank);
    plan->reduces = k == ALL_REDUCE || k == REDUCE || k == REDUCE_SCATTER;
    plan->in_shares = k == ALL_REDUCE && p > 2 && op->nbytes > TINY;
    int many_out = k == ALL_GATHER || k == GATHER || k == ALL_TO_ALL;
    for (int r = 0; r < p; r++) {
        plan->in_at[r] = op->table ? op->table[r] : plan->lanes > 1 ? r * op->nbytes : 0;
        plan->in_len[r] = op->table ? op->table[p + r] : op->nbytes;
        plan->out_at[r] = op->table ? op->table[2 * p + r] : many_out ? r * op->nbytes : 0;
        plan->out_len[r] = op->table ? op->table[3 * p + r] : op->nbytes;
    }
    uint64_t whole = 0;
    for (int r = 0; r < p && many_out; r++)
        whole += plan->out_len[r];
    plan->is_large = whole >= LARGE;
    if (plan->in_shares)
        plan_shares(l, op, plan);
}

static uint64_t longest_lane(Plan *plan)
{
    uint64_t longest = 0;
    for (int d = 0; plan->publishes && d < plan->lanes; d++)
        longest = plan->in_len[d] > longest ? plan->in_len[d] : longest;
    return longest;
}

static int overlap(uintptr_t a, uintptr_t b, uint64_t n) { return a < b + n && b < a + n; }

/* Whether others may read the input in place: it is large enough, nothing else is written to it, its lanes lie end to end. */
static int may_stay(Link *l, const Op *op, const Plan *plan)
{
    if (op->kind == ALL_REDUCE)
        return op->nbytes > TINY && op->in == op->out;
    if (op->kind == ALL_TO_ALL && !op->table && overlap(op->in, op->out, op->nbytes * l->ranks))
        return 0;
    for (int d = 0; op->table && d + 1 < plan->lanes; d++)
        if (plan->in_at[d + 1] != plan->in_at[d] + plan->in_len[d])
            return 0;
    return op->table ? plan->in_at[0] == 0 : op->nbytes > TINY;
}

static void find_region(Link *l, const Op *op, const Plan *plan, Descriptor *d)
{
    d->region = 0;
    d->known = 0;
    int stays = may_stay(l, op, plan);
    pthread_mutex_lock(&l->lock);
    for (int i = 0; i < l->region_count; i++) {
        uintptr_t mine = (uintptr_t)l->regions[i].base + l->rank * l->regions[i].stride;
        d->known |= 1ull << l->regions[i].id;
        if (stays && op->in >= mine && op->in < mine + l->regions[i].stride) {
            d->region = l->regions[i].id;
            d->offset = op->in - mine;
        }
    }
    pthread_mutex_unlock(&l->lock);
}

/* Tell the others what this rank is about to do, for the next meeting. */
static Descriptor *post(Link *l, const Op *op, Plan *plan)
{
    int turn = (l->meetings + 1) & 1;
    Descriptor *d = &rank_of(l, l->rank)->said[turn];
    d->kind = op->kind, d->dtype = op->dtype, d->op = op->op, d->root = op->root;
    d->nbytes = op->nbytes;
    d->longest = longest_lane(plan);
    find_region(l, op, plan, d);
    memcpy(lens_of(l, l->rank, turn), plan->in_len, plan->lanes * sizeof(uint64_t));
    if (has_own_lengths(op->kind))
        memcpy(expected_by(l, l->rank, turn), plan->out_len, l->ranks * sizeof(uint64_t));
    return d;
}

static int same_call(const Descriptor *a, const Descriptor *b)
{
    return a->kind == b->kind && a->dtype == b->dtype && a->op == b->op && a->root == b->root
        && (a->nbytes == b->nbytes || has_own_lengths((int)a->kind));
}

/* A rank that has another number of bytes for some rank than that one expects, or -1; the same answer on all ranks. */
static int find_wrong_length(Link *l, int turn, int lanes)
{
    const Descriptor *call = &rank_of(l, 0)->said[turn];
    for (int to = 0; to < l->ranks; to++)
        for (int from = 0, all = takes((int)call->kind, (int)call->root, to); from < l->ranks; from++)
            if ((all == ALL || (all == ROOT && (int)call->root == from))
                && lens_of(l, from, turn)[lanes > 1 ? to : 0] != expected_by(l, to, turn)[from])
                return from;
    return -1;
}

/* After the first meeting: check that all ranks make the same call, and that each has what the others expect from it. */
static int compare_calls(Link *l, Plan *plan)
{
    int turn = l->meetings & 1, wrong;
    for (int r = 1; r < l->ranks; r++)
        if (!same_call(&rank_of(l, 0)->said[turn], &rank_of(l, r)->said[turn]))
            return break_group(l, r, MISMATCHED);
    if (has_own_lengths((int)rank_of(l, 0)->said[turn].kind) && (wrong = find_wrong_length(l, turn, plan->lanes)) >= 0)
        return break_group(l, wrong, WRONG_LENGTH);
    return FINE;
}

static uint64_t lane_window(Link *l, int lanes) { return l->window / lanes / LINE * LINE; }

static void stage(Link *l, const Op *op, Plan *plan, uint64_t window)
{
    uint64_t c = lane_window(l, plan->lanes), from = window * c;
    char *slot = slot_of(l, l->rank, l->meetings + 1);
    for (int d = 0; plan->publishes && d < plan->lanes; d++)
        if (plan->lanes == 1 || d != l->rank)
            publish(&l->to_all, slot + d * c, (const char *)(op->in + plan->in_at[d] + from), part(plan->in_len[d], from, c));
}

/* The address in a shared region of what this rank takes from `r`, or NULL. `said` is in memory that others write, so it is read
 * once, and nothing outside r's part is touched, whatever it says. */
static const char *direct_source(Link *l, const Plan *plan, const Descriptor *said, int r)
{
    uint32_t id = said->region;
    uint64_t at = said->offset, n = plan->out_len[r], stride = 0;
    const char *begin = NULL;
    for (int d = 0; plan->lanes > 1 && d < l->rank; d++)   /* lanes of another rank may have other lengths than ours */
        at += lens_of(l, r, l->meetings & 1)[d];
    pthread_mutex_lock(&l->lock);   /* the list may grow in another thread; a region in use is not dropped */
    for (int i = 0; i < l->region_count; i++)
        if (l->regions[i].id == id) {
            stride = l->regions[i].stride;
            begin = l->regions[i].base + r * stride;
        }
    pthread_mutex_unlock(&l->lock);
    return at <= stride && n <= stride - at ? begin + at : NULL;
}

/* The address of what `r` has for this rank: in its own input, in a region, or in `r`'s slot of the last meeting. */
static const char *source_of(Link *l, const Op *op, const Plan *plan, int r, const char *direct)
{
    int lane = plan->lanes > 1 ? l->rank : 0;
    if (r == l->rank)
        return (const char *)(op->in + plan->in_at[lane]);
    return direct ? direct : slot_of(l, r, l->meetings) + lane * lane_window(l, plan->lanes);
}

/* Copy or add up bytes [from, from + most) of every lane that is for this rank. */
static void take(Link *l, const Op *op, Plan *plan, uint64_t from, uint64_t most, const char **direct)
{
    const char *in[MAX_RANKS];
    for (int r = 0; r < l->ranks; r++) {
        int source = plan->takes == ALL || (plan->takes == ROOT && op->root == r);
        if (!source)
            continue;
        in[r] = source_of(l, op, plan, r, direct ? direct[r] : NULL) + (direct || r == l->rank ? from : 0);
        char *out = (char *)(op->out + plan->out_at[r] + from);
        if (!plan->reduces && in[r] != out)
            (plan->is_large ? copy_past : copy)(out, in[r], part(plan->out_len[r], from, most));
    }
    if (plan->reduces && plan->takes == ALL)
        reduce(op->dtype, op->op, (char *)(op->out + plan->out_at[l->rank] + from), in, l->ranks, part(plan->out_len[0], from, most));
}

static int take_staged(Link *l, const Op *op, Plan *plan, uint64_t longest, int restage, Wait *w)
{
    uint64_t c = lane_window(l, plan->lanes);
    for (uint64_t window = 0; !window || window * c < longest; window++) {
        if (window || restage) {
            stage(l, op, plan, window);
            int why = rendezvous(l, w);
            if (why)
                return why;
        }
        take(l, op, plan, window * c, c, NULL);
    }
    return FINE;
}

/* Every rank adds up its share of each window; all read the result after the next meeting, which is also the one
 * that publishes the next window. */
static int all_reduce_in_shares(Link *l, const Op *op, Plan *plan, int restage, Wait *w)
{
    uint64_t c = lane_window(l, l->ranks), windows = (share_of(l, op->nbytes) + c - 1) / c;
    const char *in[MAX_RANKS];
    for (uint64_t t = 0; t <= windows; t++) {
        if (t < windows && (t || restage))
            stage(l, op, plan, t);
        int why = t || restage ? rendezvous(l, w) : FINE;
        if (why)
            return why;
        for (int d = 0; t && d < l->ranks; d++)
            if (d != l->rank)
                copy((char *)(op->out + plan->in_at[d] + (t - 1) * c), result_of(l, d, l->meetings - 1), part(plan->in_len[d], (t - 1) * c, c));
        uint64_t n = part(plan->in_len[l->rank], t * c, c);
        for (int r = 0; r < l->ranks; r++)
            in[r] = source_of(l, op, plan, r, NULL) + (r == l->rank ? t * c : 0);
        char *out = (char *)(op->out + plan->in_at[l->rank] + t * c);
        reduce(op->dtype, op->op, out, in, l->ranks, n);
        publish(&l->to_all, result_of(l, l->rank, l->meetings), out, n);
    }
    return FINE;
}

/* All inputs are in shared regions: add up this rank's share in place, and write it to all of them. */
static void all_reduce_in_place(Link *l, const Op *op, Plan *plan, const char **direct)
{
    uint64_t share = share_of(l, op->nbytes), n = part(op->nbytes, l->rank * share, share);
    const char *in[MAX_RANKS];
    for (int r = 0; r < l->ranks; r++)
        in[r] = source_of(l, op, plan, r, direct[r]) + (plan->in_shares ? 0 : l->rank * share);
    if (l->ranks == 2 && op->op == SUM && op->dtype <= F64) {   /* mostly gradients: in one pass */
        op->dtype == F32 ? add_both_float((float *)in[0], (float *)in[1], n / 4) : add_both_double((double *)in[0], (double *)in[1], n / 8);
        return;
    }
    for (uint64_t at = 0; at < n; at += BLOCK) {
        uint64_t piece = part(n, at, BLOCK);
        reduce_block(op->dtype, op->op, (char *)in[0], in, l->ranks, piece / SIZE[op->dtype]);
        for (int r = 1; r < l->ranks; r++)
            memcpy((char *)in[r], in[0], piece);
        for (int r = 0; r < l->ranks; r++)
            in[r] += piece;
    }
}

/* All inputs are read in place. */
static int run_direct(Link *l, const Op *op, Plan *plan, Wait *w)
{
    const char *direct[MAX_RANKS] = {NULL};
    for (int r = 0; r < l->ranks; r++)
        if (r != l->rank && publishes(op->kind, op->root, r)
            && !(direct[r] = direct_source(l, plan, &rank_of(l, r)->said[l->meetings & 1], r)))
            return break_group(l, r, DAMAGED);
    if (op->kind == ALL_REDUCE)
        all_reduce_in_place(l, op, plan, direct);
    else
        take(l, op, plan, 0, UINT64_MAX, direct);
    return rendezvous(l, w);   /* only now may an input change */
}

static int run(Link *l, const Op *op, Wait *w)
{
    Plan plan;
    int why = why_broken(l);
    if (why)
        return why;
    make_plan(l, op, &plan);
    if (!post(l, op, &plan)->region)
        stage(l, op, &plan, 0);
    if ((why = rendezvous(l, w)) || (why = compare_calls(l, &plan)) || op->kind == BARRIER)
        return why;
    uint64_t longest = 0, used = 0, known = ~0ull;
    int regions = 0, sources = 0;
    for (int r = 0; r < l->ranks; r++) {
        const Descriptor *said = &rank_of(l, r)->said[l->meetings & 1];
        longest = said->longest > longest ? said->longest : longest;
        known &= said->known;
        if (publishes(op->kind, op->root, r)) {
            sources++;
            regions += said->region != 0;
            used |= 1ull << (said->region & 63);
        }
    }
    if (regions < sources || used & ~known)   /* some input is private, or some rank has given its region back */
        return plan.in_shares ? all_reduce_in_shares(l, op, &plan, regions > 0, w)
                              : take_staged(l, op, &plan, longest, regions > 0, w);
    return run_direct(l, op, &plan, w);
}

/* ------------------------------------------------------------------ collectives one after the other */

/* Let the worker run the first call, if it can begin. */
static void wake_worker(Link *l)
{
    if (l->first && !l->running && l->has_worker)
        pthread_cond_signal(&l->given);
}

/* A signal costs a system call, so it is sent only if a thread waits for it. Threads that wait for a call wake the worker if they
 * do not run the queue themselves. */
static void tell_of_turn(Link *l)
{
    if (l->waiting)
        pthread_cond_broadcast(&l->changed);
    else
        wake_worker(l);
}

/* Begin a turn now, or return 0 if other calls come first. */
static int begin_at_once(Link *l)
{
    pthread_mutex_lock(&l->lock);
    int free_now = !l->first && !l->running && !l->closing;
    if (free_now)
        l->running = 1;
    pthread_mutex_unlock(&l->lock);
    return free_now;
}

static void end_turn(Link *l)
{
    pthread_mutex_lock(&l->lock);
    l->running = 0;
    tell_of_turn(l);
    pthread_mutex_unlock(&l->lock);
}

/* Run the first call of the queue. The lock is held before and after. */
static void run_first(Link *l, PyThreadState **state, int spin_us)
{
    Op *op = l->first;
    l->running = 1;
    pthread_mutex_unlock(&l->lock);
    Wait w = {state, now() + op->timeout, spin_us, 0};
    int why = run(l, op, &w);
    pthread_mutex_lock(&l->lock);
    if (why && !l->failed)
        l->failed = op->ticket;
    l->running = 0;
    if (!(l->first = op->next))
        l->last = NULL;
    atomic_store(&l->finished, op->ticket);
    free(op->table);
    free(op);
    tell_of_turn(l);
}

static void *work(void *self)
{
    Link *l = self;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        while ((!l->first || l->running) && !l->closing)
            pthread_cond_wait(&l->given, &l->lock);
        if (l->closing)
            break;
        run_first(l, NULL, l->spin_us / 10);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static void *copied(const void *from, size_t n)
{
    void *to = malloc(n);
    return to ? memcpy(to, from, n) : NULL;
}

/* Queue a call. Returns its ticket, or 0 when there is no thread or no memory for it. Takes over its table. */
static uint64_t enqueue(Link *l, const Op *asked)
{
    Op *op = copied(asked, sizeof *asked);
    if (!op) {
        free(asked->table);
        return 0;
    }
    pthread_mutex_lock(&l->lock);
    uint64_t ticket = op->ticket = ++l->issued;
    if (!l->has_worker && !l->closing)
        l->has_worker = !pthread_create(&l->worker, NULL, work, l);
    if (!l->has_worker) {
        ticket = l->closing ? ticket : 0;   /* waiting for this ticket reports that this rank has left */
        pthread_mutex_unlock(&l->lock);
        free(op->table);
        free(op);
        return ticket;
    }
    if (l->last)
        l->last->next = op;
    else
        l->first = op;
    l->last = op;
    pthread_cond_signal(&l->given);
    pthread_mutex_unlock(&l->lock);
    return ticket;
}

static void nap_on(pthread_cond_t *cond, pthread_mutex_t *lock, double seconds)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    int64_t ns = t.tv_nsec + (int64_t)(seconds * 1e9);
    t.tv_sec += ns / 1000000000;
    t.tv_nsec = ns % 1000000000;
    pthread_cond_timedwait(cond, lock, &t);
}

/* Wait until the collective of this ticket has ended. A thread that waits longer than a call may take runs the queue itself: that
 * is faster than waking the worker. TIMED_OUT does not break the group: the call may still end. */
static int await(Link *l, uint64_t ticket, Wait *w)
{
    int why = FINE;
    pthread_mutex_lock(&l->lock);
    while (!why && atomic_load(&l->finished) < ticket && !l->closing) {
        if (l->first && !l->running && w->deadline - now() > l->first->timeout) {
            run_first(l, w->state, w->spin_us);
            continue;
        }
        wake_worker(l);   /* this thread may be gone before the call has ended */
        l->waiting++;
        nap_on(&l->changed, &l->lock, slice(w));
        l->waiting--;
        pthread_mutex_unlock(&l->lock);
        if (interrupted(w))
            why = break_group(l, l->rank, INTERRUPTED);
        else if (now() > w->deadline && atomic_load(&l->finished) < ticket)
            why = TIMED_OUT;
        pthread_mutex_lock(&l->lock);
    }
    wake_worker(l);   /* a turn that ended while this thread woke up was told to this thread only */
    int failed = l->failed && l->failed <= ticket, left = atomic_load(&l->finished) < ticket;
    pthread_mutex_unlock(&l->lock);
    return why ? why : failed ? (why_broken(l) ? why_broken(l) : LEFT) : left ? LEFT : FINE;
}

/* ------------------------------------------------------------------ messages between two ranks */

static void copy_in(Path *path, Ring *ring, uint64_t size, uint64_t at, const char *from, uint64_t n)
{
    uint64_t begin = at & (size - 1), first = n < size - begin ? n : size - begin;
    publish(path, ring->bytes + begin, from, first);
    publish(path, ring->bytes, from + first, n - first);
}

static void copy_out(Ring *ring, uint64_t size, uint64_t at, char *to, uint64_t n)
{
    uint64_t begin = at & (size - 1), first = n < size - begin ? n : size - begin;
    copy(to, ring->bytes + begin, first);
    copy(to + first, ring->bytes, n - first);
}

/* Put the next piece of a message in the ring, as far as there is room. Returns whether anything moved. */
static int push(Link *l, Message *m)
{
    Ring *ring = ring_of(l, l->rank, m->peer);
    uint64_t size = ring_size(l->ranks), written = atomic_load_explicit(&ring->written, memory_order_relaxed), begin = written;
    uint64_t there = written - atomic_load_explicit(&ring->read, memory_order_acquire), room = size - there;
    if (there > size)
        return !break_group(l, m->peer, DAMAGED);
    if (!m->started && room >= sizeof(Envelope)) {
        Envelope head = {m->tag, m->size};
        copy_in(&l->to[m->peer], ring, size, written, (char *)&head, sizeof head);
        written += sizeof head;
        room -= sizeof head;
        m->started = 1;
    }
    if (!m->started)
        return 0;
    uint64_t n = part(bytes_of(m->size), m->moved, part(room, 0, PIECE));
    copy_in(&l->to[m->peer], ring, size, written, m->at + m->moved, n);
    m->moved += n;
    atomic_store_explicit(&ring->written, written + n, memory_order_release);
    if (m->moved == bytes_of(m->size))
        m->done = 1;
    if (written + n != begin)
        ring_bell(rank_of(l, m->peer));
    return written + n != begin;
}

/* The first receive that waits for this message; `others`: whether receives wait for other messages of the same rank. */
static Message *receiver(Link *l, int peer, int64_t tag, int *others)
{
    *others = 0;
    for (Message *m = l->messages; m; m = m->next) {
        if (m->sending || m->started || m->done || (m->peer >= 0 && m->peer != peer))
            continue;
        if (m->tag == tag)
            return m;
        *others = 1;
    }
    return NULL;
}

static int accept_message(Link *l, int peer, const Envelope *head, Message *m)
{
    if (m->size != head->size)
        return break_group(l, peer, WRONG_LENGTH);
    m->peer = peer;
    m->started = 1;
    return FINE;
}

/* Copy an early message to the receive that it is for, if there is one by now. */
static void hand_out(Link *l, Early **at)
{
    Early *e = *at;
    int others;
    Message *m = receiver(l, e->peer, e->head.tag, &others);
    if (!m || !e->whole || accept_message(l, e->peer, &e->head, m))
        return;
    copy(m->at, e->bytes, bytes_of(m->size));
    m->done = 1;
    *at = e->next;
    free(e);
}

/* An early message is complete. Hand it out before the next one is opened: messages of one tag do not overtake each other. */
static void put_aside(Link *l, Early *e)
{
    Early **at = &l->early;
    while (*at != e)
        at = &(*at)->next;
    e->whole = 1;
    hand_out(l, at);
}

/* Begin to read the next message of a ring, if a receive waits for it or for one after it. */
static int open_envelope(Link *l, int peer, Ring *ring, uint64_t size, uint64_t *read, uint64_t there)
{
    Incoming *in = &l->incoming[peer];
    int others;
    if (there < sizeof(Envelope))
        return 0;
    copy_out(ring, size, *read, (char *)&in->head, sizeof(Envelope));
    in->message = receiver(l, peer, in->head.tag, &others);
    in->early = NULL;
    if (!in->message && !others)
        return 0;
    if (in->message && accept_message(l, peer, &in->head, in->message))
        return 0;
    if (!in->message && !is_possible(in->head.size))
        return !break_group(l, peer, DAMAGED);
    if (!in->message) {
        Early **end = &l->early;
        while (*end)
            end = &(*end)->next;
        if (!(*end = in->early = calloc(1, sizeof(Early) + bytes_of(in->head.size))))
            return !break_group(l, l->rank, NO_MEMORY);
        in->early->peer = peer;
        in->early->head = in->head;
    }
    *read += sizeof(Envelope);
    in->moved = 0;
    return in->busy = 1;
}

/* Read what has come from one rank; of a long message, one piece. Returns whether anything moved. */
static int pull(Link *l, int peer)
{
    Ring *ring = ring_of(l, peer, l->rank);
    Incoming *in = &l->incoming[peer];
    uint64_t size = ring_size(l->ranks), read = atomic_load_explicit(&ring->read, memory_order_relaxed), begin = read;
    uint64_t written = atomic_load_explicit(&ring->written, memory_order_acquire);
    if (written - read > size)
        return !break_group(l, peer, DAMAGED);
    while (in->busy || open_envelope(l, peer, ring, size, &read, written - read)) {
        uint64_t n = part(bytes_of(in->head.size), in->moved, part(written - read, 0, PIECE));
        copy_out(ring, size, read, (in->message ? in->message->at : in->early->bytes) + in->moved, n);
        read += n;
        in->moved += n;
        if (in->moved < bytes_of(in->head.size))
            break;
        in->busy = 0;
        if (in->message)
            in->message->done = 1;
        else
            put_aside(l, in->early);
    }
    atomic_store_explicit(&ring->read, read, memory_order_release);
    if (read != begin)
        ring_bell(rank_of(l, peer));
    return read != begin;
}

/* Move every message one piece further. Nothing moves if the group is broken, or was left: its memory may be gone. Called with `post`
 * held. Returns whether anything moved. */
static int move_messages(Link *l)
{
    int moved = 0, ended = 0;
    char blocked[MAX_RANKS] = {0};
    if (why_broken(l) || l->closing)
        return 0;
    for (Message *m = l->messages; m; m = m->next) {
        if (!m->sending || m->done || blocked[m->peer])
            continue;
        moved |= push(l, m);
        blocked[m->peer] = !m->done;   /* messages to one rank do not overtake each other */
    }
    for (Early **at = &l->early, *e; (e = *at);) {
        hand_out(l, at);
        at = *at == e ? &e->next : at;
    }
    for (int r = 0; r < l->ranks; r++)
        moved |= pull(l, r);
    for (Message **at = &l->messages; *at;) {
        Message *m = *at;
        if (!m->done) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        ended = 1;
        if (m->orphan)
            free(m);
    }
    if (ended)
        ring_bell(rank_of(l, l->rank));   /* other threads of this rank may wait for a message that has just ended */
    return moved | ended;
}

static void add_message(Link *l, Message *m)
{
    Message **end = &l->messages;
    while (*end)
        end = &(*end)->next;
    *end = m;
}

/* The rank that a message waits for, and why it will not come. Any rank that has died ends every wait: the sender may be waiting for it,
 * and errors should name it. A receive from any rank is lost, too, when all others have left. */
static int find_gone(Link *l, Message *m, int *gone)
{
    int from_any = m && m->peer < 0, last = -1, here = 0;
    *gone = FINE;
    if (m && !from_any && (*gone = why_gone(rank_of(l, m->peer))))
        return m->peer;
    for (int r = 0; m && r < l->ranks && *gone != LOST; r++) {
        int why = r == l->rank ? FINE : why_gone(rank_of(l, r));
        here += r != l->rank && !why;
        if (why == LOST || (why && from_any))
            *gone = why, last = r;
    }
    if (*gone != LOST && here)
        *gone = FINE, last = -1;
    return *gone || from_any || !m ? last : m->peer;
}

static int move_once(Link *l)
{
    pthread_mutex_lock(&l->post);
    int moved = move_messages(l);
    pthread_mutex_unlock(&l->post);
    return moved;
}

/* Sleep until a bell rings for this rank, but at most SLICE_MS. Returns why to give up, or FINE. */
static int listen_for_bell(Link *l, Message *m, Wait *w)
{
    Rank *me = rank_of(l, l->rank);
    int why = FINE;
    atomic_fetch_add(&me->listeners, 1);
    atomic_thread_fence(memory_order_seq_cst);   /* pairs with the fence of ring_bell: one of the two sees what the other has stored */
    uint32_t heard = atomic_load(&me->bell);
    if (!move_once(l) && !(m && m->done)) {
        futex_sleep(&me->bell, heard, slice(w));
        if (!move_once(l) && !(m && m->done)) {
            int gone, missing = find_gone(l, m, &gone);
            if (!move_once(l) && !(m && m->done))   /* after the check: a rank that is gone now may have sent before */
                why = still_worth_waiting(l, w, missing, gone);
        }
    }
    atomic_fetch_sub(&me->listeners, 1);
    return why;
}

/* Move messages until this one is done. */
static int deliver(Link *l, Message *m, Wait *w)
{
    int why = l->closing ? LEFT : why_broken(l);
    double end = 0;
    for (int quiet = 0; !why && !m->done;) {
        if (move_once(l)) {
            quiet = 0;
            continue;
        }
        if (++quiet < 64) {
            RELAX();
            continue;
        }
        if (l->yields)
            sched_yield();
        end = end ? end : now() + 1e-6 * (w->spin_us + l->yields);
        if (now() > end)
            why = listen_for_bell(l, m, w);
    }
    if (!m->done)
        return why;
    pthread_mutex_lock(&l->post);   /* the thread that ended it may not have unlinked it yet */
    pthread_mutex_unlock(&l->post);
    return FINE;
}

/* The background thread for messages. A caller mostly waits for a posted message at once, and moves it faster: so sleep a little first. */
static void *carry(void *self)
{
    Link *l = self;
    Wait w = {NULL, INFINITY, 0, 1};
    for (;;) {
        int idle = 0;
        pthread_mutex_lock(&l->post);
        for (; !l->messages && !l->closing; idle = 1)
            pthread_cond_wait(&l->posted, &l->post);
        int closing = l->closing;
        pthread_mutex_unlock(&l->post);
        if (closing || why_broken(l))
            return NULL;
        if (idle)
            usleep(PATIENCE_US);
        listen_for_bell(l, NULL, &w);
    }
}

static void take_out(Link *l, Message *m)
{
    for (Message **at = &l->messages; *at; at = &(*at)->next)
        if (*at == m) {
            *at = m->next;
            break;
        }
    for (int r = 0; r < l->ranks; r++)
        if (l->incoming[r].message == m)
            l->incoming[r].busy = 0;
}

static void withdraw(Link *l, Message *m)
{
    pthread_mutex_lock(&l->post);
    take_out(l, m);
    pthread_mutex_unlock(&l->post);
}

/* ------------------------------------------------------------------ for Python */

#define NUMBER(i) PyLong_AsLongLong(args[i])
#define ADDRESS(i) ((char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[i]))
#define SECONDS(i) PyFloat_AsDouble(args[i])
#define CHECKED(count) \
    if (n != (count)) return PyErr_Format(PyExc_TypeError, "%d arguments expected, %zd given", count, n)
#define USABLE(l) \
    if (is_forked(l)) return PyLong_FromLong(FORKED)

static int is_in(int64_t number, int64_t from, int64_t to, const char *what)
{
    if ((number < from || number > to) && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%s is %lld, expected %lld to %lld", what, (long long)number, (long long)from, (long long)to);
    return !PyErr_Occurred();
}

/* Read the arguments of a call, except its lengths; returns 0 with an exception set. */
static int read_op(Link *l, Op *op, PyObject *const *args)
{
    *op = (Op){.kind = (int)NUMBER(0), .dtype = (int)NUMBER(1), .op = (int)NUMBER(2), .root = (int)NUMBER(3),
               .in = (uintptr_t)ADDRESS(4), .out = (uintptr_t)ADDRESS(5), .timeout = SECONDS(7)};
    return is_in(op->kind, ALL_REDUCE, BARRIER, "kind") && is_in(op->dtype, F32, U64, "number type") && is_in(op->op, SUM, BXOR, "operation")
        && is_in(op->root, 0, l->ranks - 1, "root");
}

/* Lengths: one number, or four rows of p as bytes (offset and length, in and out). */
static int read_lengths(Link *l, Op *op, PyObject *lengths)
{
    if (PyLong_Check(lengths)) {
        op->nbytes = PyLong_AsUnsignedLongLong(lengths);
        return !PyErr_Occurred();
    }
    char *rows;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(lengths, &rows, &size))
        return 0;
    if (size != (Py_ssize_t)(4 * l->ranks * sizeof(uint64_t))) {
        PyErr_Format(PyExc_ValueError, "a table of %zd bytes, expected four rows of %d numbers", size, l->ranks);
        return 0;
    }
    if (!(op->table = copied(rows, size)))
        PyErr_NoMemory();
    return op->table != NULL;
}

/* Py_RETURN_NONE counts no reference in the headers of Python 3.12 and later, not even for the interface of 3.11: there each such return
 * would use up one of None's, until the interpreter ends. */
static PyObject *none(void) { return Py_NewRef(Py_None); }

/* The result of a call: why it failed, or 0; NULL if a signal handler has raised. */
static PyObject *answer(int why) { return PyErr_Occurred() ? NULL : PyLong_FromLong(why); }

static PyObject *no_thread(void)
{
    return PyErr_Format(PyExc_RuntimeError, "no thread could be started for collectives in the background");
}

/* run(kind, dtype, op, root, in, out, lengths, timeout) -> why */
static PyObject *link_run(Link *l, PyObject *const *args, Py_ssize_t n)
{
    CHECKED(8);
    USABLE(l);
    Op op;
    if (!read_op(l, &op, args) || !read_lengths(l, &op, args[6]))
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    Wait w = {&state, now() + op.timeout, l->spin_us, 0};
    int why = FINE, accepted = 1;
    if (begin_at_once(l)) {
        why = run(l, &op, &w);
        end_turn(l);
        free(op.table);
    } else {
        uint64_t ticket = enqueue(l, &op);
        w.deadline = INFINITY;   /* its own time-out begins with its turn */
        if ((accepted = ticket != 0))
            why = await(l, ticket, &w);
    }
    PyEval_RestoreThread(state);
    return accepted ? answer(why) : no_thread();
}

/* submit(kind, dtype, op, root, in, out, lengths, timeout) -> ticket; 0 in a forked child */
static PyObject *link_submit(Link *l, PyObject *const *args, Py_ssize_t n)
{
    CHECKED(8);
    if (is_forked(l))
        return PyLong_FromLong(0);
    Op op;
    if (!read_op(l, &op, args) || !read_lengths(l, &op, args[6]))
        return NULL;
    uint64_t ticket = enqueue(l, &op);
    return ticket ? PyLong_FromUnsignedLongLong(ticket) : no_thread();
}

/* await(ticket, seconds) -> why */
static PyObject *link_await(Link *l, PyObject *const *args, Py_ssize_t n)
{
    CHECKED(2);
    USABLE(l);
    uint64_t ticket = PyLong_AsUnsignedLongLong(args[0]);
    double seconds = SECONDS(1);
    if (PyErr_Occurred())
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    Wait w = {&state, now() + seconds, l->spin_us, 1};
    int why = await(l, ticket, &w);
    PyEval_RestoreThread(state);
    return answer(why);
}

static PyObject *link_finished(Link *l, PyObject *Py_UNUSED(none)) { return PyLong_FromUnsignedLongLong(atomic_load(&l->finished)); }

/* Whether the other end of a message is one of the ranks, or for a receive -1. */
static int is_peer(Link *l, const Message *m) { return is_in(m->peer, m->sending ? 0 : -1, l->ranks - 1, "the other end of a message"); }

/* message(sending, address, size, peer, tag, timeout) -> the other rank, or -why */
static PyObject *link_message(Link *l, PyObject *const *args, Py_ssize_t n)
{
    CHECKED(6);
    if (is_forked(l))
        return PyLong_FromLong(-FORKED);
    Message m = {.sending = (int)NUMBER(0), .at = ADDRESS(1), .size = (uint64_t)NUMBER(2), .peer = (int)NUMBER(3), .tag = NUMBER(4)};
    double timeout = SECONDS(5);
    if (!is_peer(l, &m))
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    Wait w = {&state, now() + timeout, l->spin_us, 0};
    pthread_mutex_lock(&l->post);
    add_message(l, &m);
    pthread_mutex_unlock(&l->post);
    int why = deliver(l, &m, &w);
    if (why)
        withdraw(l, &m);
    PyEval_RestoreThread(state);
    return answer(why ? -why : m.peer);
}

/* exchange(address, size, to, address, size, from, tag, timeout) -> why: send one, receive another, in any order */
static PyObject *link_exchange(Link *l, PyObject *const *args, Py_ssize_t n)
{
    CHECKED(8);
    USABLE(l);
    Message out = {.sending = 1, .at = ADDRESS(0), .size = (uint64_t)NUMBER(1), .peer = (int)NUMBER(2), .tag = NUMBER(6)};
    Message in = {.at = ADDRESS(3), .size = (uint64_t)NUMBER(4), .peer = (int)NUMBER(5), .tag = NUMBER(6)};
    double timeout = SECONDS(7);
    if (!is_peer(l, &out) || !is_peer(l, &in))
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    Wait w = {&state, now() + timeout, l->spin_us, 0};
    pthread_mutex_lock(&l->post);
    add_message(l, &out);
    add_message(l, &in);
    pthread_mutex_unlock(&l->post);
    int why = deliver(l, &in, &w);
    why = why ? why : deliver(l, &out, &w);
    if (why) {
        withdraw(l, &in);
        withdraw(l, &out);
    }
    PyEval_RestoreThread(state);
    return answer(why);
}

/* Another thread may move messages for long with `post` locked: release the GIL to wait for it, or all other threads would wait, too. */
static PyThreadState *lock_post(Link *l)
{
    PyThreadState *state = pthread_mutex_trylock(&l->post) ? PyEval_SaveThread() : NULL;
    if (state)
        pthread_mutex_lock(&l->post);
    return state;
}

static void unlock_post(Link *l, PyThreadState *state)
{
    pthread_mutex_unlock(&l->post);
    if (state)
        PyEval_RestoreThread(state);
}

/* post(sending, address, size, peer, tag) -> handle; 0 in a forked child */
static PyObject *link_post(Link *l, PyObject *const *args, Py_ssize_t n)
{
    CHECKED(5);
    Message asked = {.sending = (int)NUMBER(0), .at = ADDRESS(1), .size = (uint64_t)NUMBER(2), .peer = (int)NUMBER(3), .tag = NUMBER(4)};
    if (!is_peer(l, &asked))
        return NULL;
    if (is_forked(l))
        return PyLong_FromLong(0);
    Message *m = copied(&asked, sizeof asked);
    if (!m)
        return PyErr_NoMemory();
    PyThreadState *state = lock_post(l);
    add_message(l, m);
    int moved = move_messages(l);   /* a small one is sent here and now; of a larger one as much as the ring holds, without the GIL */
    if (moved && !m->done && !state)
        state = PyEval_SaveThread();
    for (uint64_t room = ring_size(l->ranks); moved && room && !m->done; room -= part(room, 0, PIECE))
        moved = move_messages(l);
    int problem = 0;
    if (!m->done && !l->has_postman && !l->closing)
        l->has_postman = !(problem = pthread_create(&l->postman, NULL, carry, l));
    if (problem) {
        if (m->started)
            break_group(l, l->rank, ABORTED);   /* what comes next from this rank, or to it, would be taken for the rest of this message */
        take_out(l, m);
    } else if (!m->done)
        pthread_cond_signal(&l->posted);
    unlock_post(l, state);
    if (problem) {
        free(m);
        return PyErr_Format(PyExc_RuntimeError, "no thread could be started to carry messages: %s", strerror(problem));
    }
    return PyLong_FromVoidPtr(m);
}

/* settle(handle, seconds) -> the other rank, or -why */
static PyObject *link_settle(Link *l, PyObject *const *args, Py_ssize_t n)
{
    CHECKED(2);
    if (is_forked(l))
        return PyLong_FromLong(-FORKED);
    Message *m = PyLong_AsVoidPtr(args[0]);
    double seconds = SECONDS(1);
    if (PyErr_Occurred())
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    Wait w = {&state, now() + seconds, l->spin_us, 1};
    int why = deliver(l, m, &w);
    PyEval_RestoreThread(state);
    return answer(why ? -why : m->peer);
}

static PyObject *link_settled(Link *l, PyObject *handle)
{
    return PyBool_FromLong(((Message *)PyLong_AsVoidPtr(handle))->done || why_broken(l) || l->closing);
}

/* drop(handle): forget a posted message; if it is in flight, it goes on. */
static PyObject *link_drop(Link *l, PyObject *handle)
{
    Message *m = PyLong_AsVoidPtr(handle);
    if (is_forked(l) || !m)   /* 0: it was never posted */
        return none();
    PyThreadState *state = lock_post(l);
    if (m->done)
        free(m);
    else
        m->orphan = 1;
    unlock_post(l, state);
    return none();
}

/* add_region(id, address, stride): rank r's part begins at address + r * stride. id: 1 to 63, the same on all ranks. */
static PyObject *link_add_region(Link *l, PyObject *const *args, Py_ssize_t n)
{
    CHECKED(3);
    Region region = {(uint32_t)NUMBER(0), ADDRESS(1), (uint64_t)NUMBER(2)};
    if (!is_in(region.id, 1, 63, "the number of a region"))
        return NULL;
    pthread_mutex_lock(&l->lock);
    Region *grown = realloc(l->regions, (l->region_count + 1) * sizeof region);
    if (grown) {
        l->regions = grown;
        l->regions[l->region_count++] = region;
    }
    pthread_mutex_unlock(&l->lock);
    return grown ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

/* drop_region(id) -> whether it is forgotten; it is not while a collective may be reading it. */
static PyObject *link_drop_region(Link *l, PyObject *id)
{
    uint32_t gone = (uint32_t)PyLong_AsUnsignedLong(id);
    if (is_forked(l))
        return PyBool_FromLong(1);
    pthread_mutex_lock(&l->lock);
    int idle = !l->running && !l->first;
    for (int i = 0; idle && i < l->region_count; i++)
        if (l->regions[i].id == gone)
            l->regions[i--] = l->regions[--l->region_count];
    pthread_mutex_unlock(&l->lock);
    return PyBool_FromLong(idle);
}

/* break_off(rank, why): break the group, which ends every wait of every rank. */
static PyObject *link_break_off(Link *l, PyObject *const *args, Py_ssize_t n)
{
    CHECKED(2);
    if (!is_forked(l))
        break_group(l, (int)NUMBER(0), (int)NUMBER(1));
    return none();
}

/* leave(): this rank makes no more calls, and ranks that wait for it are told. Ends this rank's threads. */
static PyObject *link_leave(Link *l, PyObject *Py_UNUSED(none))
{
    if (is_forked(l) || atomic_exchange(&l->closing, 1))   /* two threads may leave at once */
        return none();
    PyThreadState *state = PyEval_SaveThread();
    pthread_mutex_lock(&l->lock);   /* who has tested `closing` before sleeps by now, and hears the signals */
    pthread_mutex_lock(&l->post);
    pthread_cond_broadcast(&l->changed);
    pthread_cond_broadcast(&l->given);
    pthread_cond_broadcast(&l->posted);
    pthread_mutex_unlock(&l->post);
    pthread_mutex_unlock(&l->lock);
    atomic_store(&rank_of(l, l->rank)->left, 1);
    wake_all(l);
    if (l->has_worker)
        pthread_join(l->worker, NULL);
    if (l->has_postman)
        pthread_join(l->postman, NULL);
    PyEval_RestoreThread(state);
    return none();
}

/* status() -> (why, blamed rank or -1, [number of meetings of each rank], [letter_of each rank]) */
static PyObject *link_status(Link *l, PyObject *Py_UNUSED(none))
{
    PyObject *arrived = PyList_New(l->ranks), *states = PyList_New(l->ranks);
    for (int r = 0; r < l->ranks; r++) {
        PyList_SetItem(arrived, r, PyLong_FromUnsignedLong(atomic_load(&rank_of(l, r)->arrived)));
        PyList_SetItem(states, r, PyUnicode_FromFormat("%c", letter_of(rank_of(l, r))));
    }
    uint32_t broken = atomic_load(&control(l)->broken);
    return Py_BuildValue("(iiNN)", (int)(broken >> 16), broken ? (int)(broken & 0xffff) : -1, arrived, states);
}

/* calls() -> the call of each rank at its last meeting: [(kind, dtype, op, root, nbytes)] */
static PyObject *link_calls(Link *l, PyObject *Py_UNUSED(none))
{
    PyObject *calls = PyList_New(l->ranks);
    for (int r = 0; r < l->ranks; r++) {
        Descriptor *d = &rank_of(l, r)->said[atomic_load(&rank_of(l, r)->arrived) & 1];
        PyList_SetItem(calls, r, Py_BuildValue("(iiiiK)", d->kind, d->dtype, d->op, d->root, (unsigned long long)d->nbytes));
    }
    return calls;
}

/* Link(address, rank, ranks, spin_us, yields, window): all but address, rank and spin_us must be the same on all ranks */
static PyObject *link_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned long long base, window;
    int rank, ranks, spin_us, yields;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "KiiiiK", &base, &rank, &ranks, &spin_us, &yields, &window))
        return NULL;
    if (!is_in(ranks, 1, MAX_RANKS, "the number of ranks on one host") || !is_in(rank, 0, ranks - 1, "rank")
        || !is_in((int64_t)window, LINE * ranks, STAGING / 2, "window"))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Incoming *incoming = calloc(ranks, sizeof *incoming);
    Path *to = calloc(ranks, sizeof *to);
    Link *l = incoming && to ? (Link *)allocate(type, 0) : NULL;
    if (!l) {
        free(incoming);
        free(to);
        return PyErr_NoMemory();
    }
    l->base = (char *)(uintptr_t)base;
    l->rank = rank, l->ranks = ranks, l->spin_us = spin_us, l->yields = yields, l->window = window;
    /* Ranks that share cores also share caches; and the slots of many ranks together should stay in the third-level cache. */
    for (l->turns = 2; !yields && l->turns * 2 * window <= STAGING && ranks * l->turns * 2 * window <= 8 * STAGING;)
        l->turns *= 2;
    l->generation = atomic_load(&forks);
    l->incoming = incoming, l->to = to;
    pthread_mutex_init(&l->lock, NULL);
    pthread_mutex_init(&l->post, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&l->changed, &monotonic);
    pthread_cond_init(&l->given, &monotonic);
    pthread_cond_init(&l->posted, &monotonic);
    Rank *me = rank_of(l, rank);
    process_state(getpid(), &me->started);
    atomic_store(&me->pid, getpid());   /* last: a rank that sees it compares `started` */
    return (PyObject *)l;
}

static void link_dealloc(Link *l)
{
    PyTypeObject *type = Py_TYPE((PyObject *)l);
    Py_XDECREF(link_leave(l, NULL));
    while (l->first) {   /* queued when this rank left */
        Op *next = l->first->next;
        free(l->first->table);
        free(l->first);
        l->first = next;
    }
    while (l->early) {
        Early *next = l->early->next;
        free(l->early);
        l->early = next;
    }
    while (l->messages) {   /* dropped, and never finished */
        Message *next = l->messages->next;
        free(l->messages);
        l->messages = next;
    }
    free(l->incoming);
    free(l->to);
    free(l->regions);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(l);
    Py_DECREF(type);
}

static PyObject *shared_segment_size(PyObject *module, PyObject *ranks)
{
    long p = PyLong_AsLong(ranks);
    (void)module;
    return is_in(p, 1, MAX_RANKS, "the number of ranks on one host") ? PyLong_FromUnsignedLongLong(segment_size((int)p)) : NULL;
}

#define METHOD(name, call, doc) {name, (PyCFunction)(void (*)(void))call, METH_FASTCALL, doc}
static PyMethodDef link_methods[] = {
    METHOD("run", link_run, "A collective, now. -> why it failed, or 0"),
    METHOD("submit", link_submit, "A collective, in its turn, in the background. -> ticket"),
    METHOD("wait", link_await, "Until a ticket's collective has ended. -> why it failed, or 0"),
    METHOD("message", link_message, "Send or receive, now. -> from whom, or -why"),
    METHOD("exchange", link_exchange, "Send one message and receive another. -> why it failed, or 0"),
    METHOD("post", link_post, "Send or receive in the background. -> handle"),
    METHOD("settle", link_settle, "Until a posted message has arrived. -> from whom, or -why"),
    METHOD("add_region", link_add_region, "Memory that all ranks map, a part for each."),
    METHOD("break_off", link_break_off, "End every wait of every rank."),
    {"finished", (PyCFunction)link_finished, METH_NOARGS, "The last ticket that has ended."},
    {"settled", (PyCFunction)link_settled, METH_O, "Whether a posted message has arrived, or never will."},
    {"drop", (PyCFunction)link_drop, METH_O, "Forget a posted message."},
    {"drop_region", (PyCFunction)link_drop_region, METH_O, "Forget a region."},
    {"leave", (PyCFunction)link_leave, METH_NOARGS, "No call will follow from this rank."},
    {"status", (PyCFunction)link_status, METH_NOARGS, "Who is where, and who is to blame."},
    {"calls", (PyCFunction)link_calls, METH_NOARGS, "What each rank called last."},
    {NULL},
};
static PyType_Slot link_slots[] = {
    {Py_tp_new, link_new}, {Py_tp_dealloc, link_dealloc}, {Py_tp_methods, link_methods},
    {Py_tp_doc, "One rank's end of a group in shared memory."}, {0, NULL},
};
static PyType_Spec link_spec = {"rankloom.world.transport._shared.Link", sizeof(Link), 0, Py_TPFLAGS_DEFAULT, link_slots};
static PyMethodDef functions[] = {
    {"segment_size", shared_segment_size, METH_O, "Bytes of shared memory that a group of so many ranks needs."}, {NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_shared", "Collectives in shared memory.", -1, functions};

PyMODINIT_FUNC PyInit__shared(void)
{
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&link_spec);
    if (!made || !type || PyModule_AddObject(made, "Link", type) || pthread_atfork(NULL, NULL, count_fork))
        return NULL;
    return made;
}
