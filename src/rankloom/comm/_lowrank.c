/* The inner loops of comm/power.py: products of a large matrix with a few columns. Read that file first.
 *
 * Each pass reads the large matrix once, at the speed of memory; the narrow ones stay in the cache. Sums run over LANES partial
 * sums in a fixed order and products are never contracted, so every processor computes the same bits.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && defined(__x86_64__) && defined(__GLIBC__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#if defined(__GNUC__)
#define INLINED static inline __attribute__((always_inline))
#else
#define INLINED static inline
#endif

enum { LANES = 16, HIGHEST_RANK = 16, PANEL = 512 };
typedef Py_ssize_t Size;

/* Calls `body` with the rank as a constant where that is a usual one, so that the compiler unrolls the loops over it. */
#define WITH_RANK(rank, body, ...)                                                                                     \
    switch (rank) {                                                                                                    \
    case 1: body(__VA_ARGS__, 1); break;                                                                               \
    case 2: body(__VA_ARGS__, 2); break;                                                                               \
    case 4: body(__VA_ARGS__, 4); break;                                                                               \
    default: body(__VA_ARGS__, rank);                                                                                  \
    }

/* `columns` of one row: kept += x - left right, and their products with the rows of q are added to p. */
INLINED void absorb_piece(const float *restrict x, float *restrict kept, const float *restrict left, float right[][PANEL],
                          float q[][PANEL], float *restrict p, int columns, const int rank)
{
    float sums[HIGHEST_RANK][LANES] = {{0}};
    int at = 0;
    for (; at + LANES <= columns; at += LANES) {
        float m[LANES];
        for (int l = 0; l < LANES; l++)
            m[l] = kept[at + l] + x[at + l];
        for (int k = 0; k < rank; k++)
            for (int l = 0; l < LANES; l++)
                m[l] -= left[k] * right[k][at + l];
        for (int k = 0; k < rank; k++)
            for (int l = 0; l < LANES; l++)
                sums[k][l] += m[l] * q[k][at + l];
        memcpy(kept + at, m, sizeof m);
    }
    for (; at < columns; at++) {
        float m = kept[at] + x[at];
        for (int k = 0; k < rank; k++)
            m -= left[k] * right[k][at];
        for (int k = 0; k < rank; k++)
            sums[k][0] += m * q[k][at];
        kept[at] = m;
    }
    for (int k = 0; k < rank; k++) {
        for (int width = LANES / 2; width; width /= 2)
            for (int l = 0; l < width; l++)
                sums[k][l] += sums[k][l + width];
        p[k] += sums[k][0];
    }
}

/* A panel of columns after the other: its part of the narrow matrices is copied together, for rows of theirs that lie a power of
 * two apart would push each other out of the cache. */
INLINED void absorb_rows(const float *x, float *kept, const float *left, const float *right, const float *q, float *p, Size rows,
                         Size columns, const int rank)
{
    float near_right[HIGHEST_RANK][PANEL], near_q[HIGHEST_RANK][PANEL];
    memset(p, 0, (size_t)(rows * rank) * sizeof *p);
    for (Size at = 0; at < columns; at += PANEL) {
        const int width = columns - at < PANEL ? (int)(columns - at) : PANEL;
        for (int k = 0; k < rank; k++) {
            memcpy(near_right[k], right + k * columns + at, (size_t)width * sizeof(float));
            memcpy(near_q[k], q + k * columns + at, (size_t)width * sizeof(float));
        }
        for (Size row = 0; row < rows; row++)
            absorb_piece(x + row * columns + at, kept + row * columns + at, left + row * rank, near_right, near_q, p + row * rank,
                         width, rank);
    }
}

CLONED static void absorb(const float *x, float *kept, const float *left, const float *right, const float *q, float *p, Size rows,
                          Size columns, int rank)
{
    WITH_RANK(rank, absorb_rows, x, kept, left, right, q, p, rows, columns)
}

/* out[k] = sum over rows of p[row][k] m[row], rows in order, four at a time so that `out` is loaded seldom. */
INLINED void combine_rows(const float *restrict m, const float *restrict p, float *restrict out, Size rows, Size columns, const int rank)
{
    enum { TOGETHER = 4 };
    memset(out, 0, (size_t)(rank * columns) * sizeof *out);
    Size row = 0;
    for (; row + TOGETHER <= rows; row += TOGETHER)
        for (int k = 0; k < rank; k++) {
            const float a = p[row * rank + k], b = p[(row + 1) * rank + k], c = p[(row + 2) * rank + k], d = p[(row + 3) * rank + k];
            const float *const first = m + row * columns;
            for (Size at = 0; at < columns; at++)
                out[k * columns + at] += ((a * first[at] + b * first[columns + at])
                                          + (c * first[2 * columns + at] + d * first[3 * columns + at]));
        }
    for (; row < rows; row++)
        for (int k = 0; k < rank; k++)
            for (Size at = 0; at < columns; at++)
                out[k * columns + at] += p[row * rank + k] * m[row * columns + at];
}

CLONED static void combine(const float *m, const float *p, float *out, Size rows, Size columns, int rank)
{
    WITH_RANK(rank, combine_rows, m, p, out, rows, columns)
}

/* x = p q, the columns of p in order. */
INLINED void spread_rows(const float *restrict p, const float *restrict q, float *restrict x, Size rows, Size columns, const int rank)
{
    for (Size row = 0; row < rows; row++, x += columns, p += rank)
        for (Size at = 0; at < columns; at++) {
            float total = p[0] * q[at];
            for (int k = 1; k < rank; k++)
                total += p[k] * q[k * columns + at];
            x[at] = total;
        }
}

CLONED static void spread(const float *p, const float *q, float *x, Size rows, Size columns, int rank)
{
    WITH_RANK(rank, spread_rows, p, q, x, rows, columns)
}

/* ------------------------------------------------------------------ what Python calls */

enum { MOST = 6 };

/* The buffers of one call, each expected to hold rows x columns floats. */
typedef struct {
    Py_buffer held[MOST];
    int count;
} Buffers;

static void release(Buffers *buffers)
{
    while (buffers->count)
        PyBuffer_Release(&buffers->held[--buffers->count]);
}

static int take(Buffers *buffers, PyObject *given, int writable, Size floats)
{
    Py_buffer *const held = &buffers->held[buffers->count];
    if (PyObject_GetBuffer(given, held, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)))
        return 0;
    buffers->count++;
    if (held->len == floats * (Size)sizeof(float))
        return 1;
    PyErr_Format(PyExc_ValueError, "argument %d has %zd bytes, expected %zd floats", buffers->count, held->len, floats);
    return 0;
}

static int known_rank(int rank)
{
    if (rank < 1 || rank > HIGHEST_RANK)
        PyErr_Format(PyExc_ValueError, "rank %d is not in 1 to %d", rank, HIGHEST_RANK);
    return rank >= 1 && rank <= HIGHEST_RANK;
}

static PyObject *py_absorb(PyObject *module, PyObject *args)
{
    PyObject *x, *kept, *left, *right, *q, *p;
    Size rows, columns;
    int rank;
    Buffers b = {.count = 0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOnni", &x, &kept, &left, &right, &q, &p, &rows, &columns, &rank) || !known_rank(rank))
        return NULL;
    const int fine = take(&b, x, 0, rows * columns) && take(&b, kept, 1, rows * columns) && take(&b, left, 0, rows * rank)
        && take(&b, right, 0, rank * columns) && take(&b, q, 0, rank * columns) && take(&b, p, 1, rows * rank);
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
    if (!PyArg_ParseTuple(args, "OOOnni", &m, &p, &out, &rows, &columns, &rank) || !known_rank(rank))
        return NULL;
    const int fine = take(&b, m, 0, rows * columns) && take(&b, p, 0, rows * rank) && take(&b, out, 1, rank * columns);
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
    if (!PyArg_ParseTuple(args, "OOOnni", &p, &q, &x, &rows, &columns, &rank) || !known_rank(rank))
        return NULL;
    const int fine = take(&b, p, 0, rows * rank) && take(&b, q, 0, rank * columns) && take(&b, x, 1, rows * columns);
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        spread(b.held[0].buf, b.held[1].buf, b.held[2].buf, rows, columns, rank);
        Py_END_ALLOW_THREADS
    }
    release(&b);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef METHODS[] = {
    {"absorb", py_absorb, METH_VARARGS, "absorb(x, kept, left, right, q, p, rows, columns, rank)"},
    {"combine", py_combine, METH_VARARGS, "combine(m, p, out, rows, columns, rank)"},
    {"spread", py_spread, METH_VARARGS, "spread(p, q, x, rows, columns, rank)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_lowrank", "The inner loops of comm/power.py.", -1, METHODS,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__lowrank(void) { return PyModule_Create(&MODULE); }
