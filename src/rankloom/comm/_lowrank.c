/* The inner loops of comm/power.py: products of a large matrix with a few columns. Read that file first.
 *
 * Each pass reads the large matrix once, at the speed of memory; the narrow ones stay in the cache. Sums are LANES partial sums,
 * added in a fixed order, and products are never fused with additions. So every processor computes the same bits.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && defined(__x86_64__) && defined(__GLIBC__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#define INLINED static inline __attribute__((always_inline))
#define FETCH(address) __builtin_prefetch(address)

enum { LANES = 16, HIGHEST_RANK = 16, PANEL = 4096, STRIP = 512, TOGETHER = 4, LARGE = 1 << 22, AHEAD = 256 };
static const double NOTHING = 0x1p-40;   /* see comm/power.py */
typedef Py_ssize_t Size;
typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float Loose __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));   /* unaligned */

#if defined(__SSE__)
#include <xmmintrin.h>
enum { PAST_CACHE = 1 };
INLINED void write_past_cache(float *to, const Vector *v)
{
    for (int l = 0; l < LANES; l += 4)
        _mm_stream_ps(to + l, ((const __m128 *)v)[l / 4]);
}
#else
typedef float __m128[4];
enum { PAST_CACHE = 0 };
INLINED void write_past_cache(float *to, const Vector *v) { memcpy(to, v, sizeof *v); }
INLINED void _mm_sfence(void) {}
#endif

/* Calls `body` with usual ranks as constants, so that the compiler unrolls the loops over them. */
#define WITH_RANK(rank, body, ...)                                                                                     \
    switch (rank) {                                                                                                    \
    case 1: body(__VA_ARGS__, 1); break;                                                                               \
    case 2: body(__VA_ARGS__, 2); break;                                                                               \
    case 4: body(__VA_ARGS__, 4); break;                                                                               \
    default: body(__VA_ARGS__, rank);                                                                                  \
    }

/* Load `count` floats, padded with zeros. Prefetches the data `ahead`: the processor does not foresee jumps between rows. */
INLINED void load(Vector *v, const float *from, int count, Size ahead)
{
    if (count == LANES) {
        FETCH(from + ahead);
        *v = *(const Loose *)from;
    } else {
        *v = (Vector){0};
        memcpy(v, from, (size_t)count * sizeof(float));
    }
}

INLINED void store(float *to, const Vector *v, int count)
{
    if (count == LANES)
        *(Loose *)to = *v;
    else
        memcpy(to, v, (size_t)count * sizeof(float));
}

INLINED int step_width(int left) { return left < LANES ? left : LANES; }

/* For the next `count` columns of `rows` rows: kept += x - left right; sums += kept times q.
 * near: these columns of right and of q, one vector for each of their rows */
INLINED void absorb_step(const float *x, float *kept, Size columns, const float *left, const Vector *near, Vector sums[][HIGHEST_RANK],
                         int count, const int rows, const int rank)
{
    Vector m[TOGETHER], fresh;
    for (int r = 0; r < rows; r++) {
        load(&fresh, x + r * columns, count, AHEAD);
        load(&m[r], kept + r * columns, count, AHEAD);
        m[r] += fresh;
    }
    for (int k = 0; k < rank; k++)
        for (int r = 0; r < rows; r++)
            m[r] -= left[r * rank + k] * near[k];
    for (int k = 0; k < rank; k++)
        for (int r = 0; r < rows; r++)
            sums[r][k] += m[r] * near[rank + k];
    for (int r = 0; r < rows; r++)
        store(kept + r * columns, &m[r], count);
}

INLINED float total_of(const Vector *sums)
{
    Vector v = *sums;
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++)
            v[l] += v[l + width];
    return v[0];
}

/* The same for a panel of `width` columns; then p += the sums. */
INLINED void absorb_panel(const float *x, float *kept, Size columns, const float *left, const Vector *near, float *p, int width,
                          const int rows, const int rank)
{
    Vector sums[TOGETHER][HIGHEST_RANK];
    float factors[TOGETHER * HIGHEST_RANK];   /* a local copy: no store can alias it, so it may stay in registers */
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < rank; k++) {
            sums[r][k] = (Vector){0};
            factors[r * rank + k] = left[r * rank + k];
        }
    int at = 0;
    for (; at + LANES <= width; at += LANES, near += 2 * rank)
        absorb_step(x + at, kept + at, columns, factors, near, sums, LANES, rows, rank);
    if (at < width)
        absorb_step(x + at, kept + at, columns, factors, near, sums, width - at, rows, rank);
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < rank; k++)
            p[r * rank + k] += total_of(&sums[r][k]);
}

/* Panel by panel. First packs the panel's columns of the narrow matrices together: in place, rows a power of two apart would push
 * each other out of the cache. */
INLINED void absorb_rows(const float *x, float *kept, const float *left, const float *right, const float *q, float *p, Size rows,
                         Size columns, const int rank)
{
    Vector near[PANEL / LANES * 2 * HIGHEST_RANK];
    memset(p, 0, (size_t)(rows * rank) * sizeof *p);
    for (Size at = 0; at < columns; at += PANEL) {
        const int width = columns - at < PANEL ? (int)(columns - at) : PANEL;
        for (int step = 0; step < width; step += LANES)
            for (int k = 0; k < rank; k++) {
                Vector *const both = near + step / LANES * 2 * rank + k;
                load(&both[0], right + k * columns + at + step, step_width(width - step), 0);
                load(&both[rank], q + k * columns + at + step, step_width(width - step), 0);
            }
        Size row = 0;
        for (; row + TOGETHER <= rows; row += TOGETHER)
            absorb_panel(x + row * columns + at, kept + row * columns + at, columns, left + row * rank, near, p + row * rank, width,
                         TOGETHER, rank);
        for (; row < rows; row++)
            absorb_panel(x + row * columns + at, kept + row * columns + at, columns, left + row * rank, near, p + row * rank, width,
                         1, rank);
    }
}

CLONED static void absorb(const float *x, float *kept, const float *left, const float *right, const float *q, float *p, Size rows,
                          Size columns, int rank)
{
    WITH_RANK(rank, absorb_rows, x, kept, left, right, q, p, rows, columns)
}

/* For `count` columns of `rows` rows: sums += p^T m. Prefetches the next `rows` rows. */
INLINED void combine_step(const float *m, Size columns, const float *p, Vector *sums, int count, const int rows, const int rank)
{
    Vector row[TOGETHER];
    for (int r = 0; r < rows; r++)
        load(&row[r], m + r * columns, count, rows * columns);
    for (int k = 0; k < rank; k++) {
        Vector product = p[k] * row[0];
        for (int r = 1; r < rows; r++)
            product += p[r * rank + k] * row[r];
        sums[k] += product;
    }
}

/* out = p^T m, strip by strip of columns, so that a strip's sums stay in the nearest cache. Adds rows in order. */
INLINED void combine_rows(const float *m, const float *p, float *out, Size rows, Size columns, const int rank)
{
    Vector sums[STRIP / LANES * HIGHEST_RANK];
    for (Size at = 0; at < columns; at += STRIP) {
        const int width = columns - at < STRIP ? (int)(columns - at) : STRIP;
        for (int step = 0; step < width; step += LANES)
            for (int k = 0; k < rank; k++)
                sums[step / LANES * rank + k] = (Vector){0};
        for (Size row = 0; row < rows;) {
            const int together = row + TOGETHER <= rows;
            for (int step = 0; step < width; step += LANES) {
                const float *const from = m + row * columns + at + step;
                Vector *const to = sums + step / LANES * rank;
                if (together && width - step >= LANES)
                    combine_step(from, columns, p + row * rank, to, LANES, TOGETHER, rank);
                else if (together)
                    combine_step(from, columns, p + row * rank, to, width - step, TOGETHER, rank);
                else
                    combine_step(from, columns, p + row * rank, to, step_width(width - step), 1, rank);
            }
            row += together ? TOGETHER : 1;
        }
        for (int step = 0; step < width; step += LANES)
            for (int k = 0; k < rank; k++)
                store(out + k * columns + at + step, &sums[step / LANES * rank + k], step_width(width - step));
    }
}

CLONED static void combine(const float *m, const float *p, float *out, Size rows, Size columns, int rank)
{
    WITH_RANK(rank, combine_rows, m, p, out, rows, columns)
}

/* x = p q, adding the columns of p in order. Writes a large x past the cache, which would first read its old contents. */
INLINED void spread_rows(const float *p, const float *q, float *x, Size rows, Size columns, const int rank)
{
    const int past = PAST_CACHE && rows * columns > LARGE && (uintptr_t)x % sizeof(__m128) == 0 && columns % 4 == 0;
    for (Size row = 0; row < rows; row++, x += columns, p += rank) {
        Size at = 0;
        for (; at + LANES <= columns; at += LANES) {
            Vector total = p[0] * *(const Loose *)(q + at);
            for (int k = 1; k < rank; k++)
                total += p[k] * *(const Loose *)(q + k * columns + at);
            if (past)
                write_past_cache(x + at, &total);
            else
                *(Loose *)(x + at) = total;
        }
        for (; at < columns; at++) {
            float total = p[0] * q[at];
            for (int k = 1; k < rank; k++)
                total += p[k] * q[k * columns + at];
            x[at] = total;
        }
    }
    if (past)
        _mm_sfence();
}

CLONED static void spread(const float *p, const float *q, float *x, Size rows, Size columns, int rank)
{
    WITH_RANK(rank, spread_rows, p, q, x, rows, columns)
}

/* The sum of x y, folded by halves, in the order of comm/power.py's `_folded`. room: [n] */
INLINED float folded_product(const float *x, const float *y, float *room, Size n)
{
    Size half = 1;
    while (2 * half < n)
        half *= 2;
    for (Size i = 0; i < half; i++)
        room[i] = x[i] * y[i];
    for (Size i = half; i < n; i++)
        room[i - half] += x[i] * y[i];
    for (half /= 2; half; half /= 2)
        for (Size i = 0; i < half; i++)
            room[i] += room[half + i];
    return room[0];
}

/* Make the rows of v orthonormal, by Gram-Schmidt, twice: the second time removes the rounding errors of the first. */
CLONED static void orthonormalise(float *v, float *room, Size rank, Size n)
{
    for (int round = 0; round < 2; round++)
        for (Size k = 0; k < rank; k++) {
            float *const row = v + k * n;
            const double square = folded_product(row, row, room, n);
            const float factor = square > NOTHING * (double)n ? (float)(1.0 / sqrt(square)) : 0.0f;
            for (Size i = 0; i < n; i++)
                row[i] *= factor;
            for (float *other = row + n; other < v + rank * n; other += n) {
                const float along = folded_product(other, row, room, n);
                for (Size i = 0; i < n; i++)
                    other[i] -= along * row[i];
            }
        }
}

/* ------------------------------------------------------------------ what Python calls */

enum { MOST = 6 };

/* The buffers of one call, each checked to hold rows x columns floats. */
typedef struct {
    Py_buffer held[MOST];
    int count;
} Buffers;

static void release(Buffers *buffers)
{
    while (buffers->count)
        PyBuffer_Release(&buffers->held[--buffers->count]);
}

static int take(Buffers *buffers, PyObject *given, int writable, Size rows, Size columns)
{
    Py_buffer *const held = &buffers->held[buffers->count];
    if (PyObject_GetBuffer(given, held, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)))
        return 0;
    buffers->count++;
    if (rows >= 0 && columns >= 0 && (!columns || rows <= held->len / columns) && held->len == rows * columns * (Size)sizeof(float))
        return 1;
    PyErr_Format(PyExc_ValueError, "argument %d has %zd bytes, expected %zd x %zd floats", buffers->count, held->len, rows, columns);
    return 0;
}

static int known_rank(int rank, int highest)
{
    if (rank < 1 || rank > highest)
        PyErr_Format(PyExc_ValueError, "rank %d is not in 1 to %d", rank, highest);
    return rank >= 1 && rank <= highest;
}

static PyObject *py_absorb(PyObject *module, PyObject *args)
{
    PyObject *x, *kept, *left, *right, *q, *p;
    Size rows, columns;
    int rank;
    Buffers b = {.count = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOnni", &x, &kept, &left, &right, &q, &p, &rows, &columns, &rank) || !known_rank(rank, HIGHEST_RANK))
        return NULL;
    const int fine = take(&b, x, 0, rows, columns) && take(&b, kept, 1, rows, columns) && take(&b, left, 0, rows, rank)
        && take(&b, right, 0, rank, columns) && take(&b, q, 0, rank, columns) && take(&b, p, 1, rows, rank);
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        absorb(b.held[0].buf, b.held[1].buf, b.held[2].buf, b.held[3].buf, b.held[4].buf, b.held[5].buf, rows, columns, rank);
        Py_END_ALLOW_THREADS
    }
    release(&b);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *py_combine(PyObject *module, PyObject *args)
{
    PyObject *m, *p, *out;
    Size rows, columns;
    int rank;
    Buffers b = {.count = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOnni", &m, &p, &out, &rows, &columns, &rank) || !known_rank(rank, HIGHEST_RANK))
        return NULL;
    const int fine = take(&b, m, 0, rows, columns) && take(&b, p, 0, rows, rank) && take(&b, out, 1, rank, columns);
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        combine(b.held[0].buf, b.held[1].buf, b.held[2].buf, rows, columns, rank);
        Py_END_ALLOW_THREADS
    }
    release(&b);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *py_spread(PyObject *module, PyObject *args)
{
    PyObject *p, *q, *x;
    Size rows, columns;
    int rank;
    Buffers b = {.count = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOnni", &p, &q, &x, &rows, &columns, &rank) || !known_rank(rank, INT_MAX))
        return NULL;
    const int fine = take(&b, p, 0, rows, rank) && take(&b, q, 0, rank, columns) && take(&b, x, 1, rows, columns);
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        spread(b.held[0].buf, b.held[1].buf, b.held[2].buf, rows, columns, rank);
        Py_END_ALLOW_THREADS
    }
    release(&b);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *py_orthonormalise(PyObject *module, PyObject *args)
{
    PyObject *v, *room;
    Size rank, n;
    Buffers b = {.count = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnn", &v, &room, &rank, &n))
        return NULL;
    const int fine = take(&b, v, 1, rank, n) && take(&b, room, 1, 1, n);
    if (fine && n) {
        Py_BEGIN_ALLOW_THREADS
        orthonormalise(b.held[0].buf, b.held[1].buf, rank, n);
        Py_END_ALLOW_THREADS
    }
    release(&b);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef METHODS[] = {
    {"absorb", py_absorb, METH_VARARGS, "absorb(x, kept, left, right, q, p, rows, columns, rank)"},
    {"combine", py_combine, METH_VARARGS, "combine(m, p, out, rows, columns, rank)"},
    {"spread", py_spread, METH_VARARGS, "spread(p, q, x, rows, columns, rank)"},
    {"orthonormalise", py_orthonormalise, METH_VARARGS, "orthonormalise(v, room, rank, n)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_lowrank", "The inner loops of comm/power.py.", -1, METHODS,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__lowrank(void) { return PyModule_Create(&MODULE); }
