/* The inner loops of comm/quantize.py: fp32 to 8, 4 or 1 bits in blocks, and back. Read that file first: it says what
 * a block holds, and its torch code computes the same bits.
 *
 * Every loop runs over one block, which stays in the nearest cache, so memory is read once and written once. Loops are
 * plain: the compiler vectorises them, once for each generation of processors, and the loader picks the right version.
 * The interpreter's lock is released meanwhile.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
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

enum { HEAD = 2, BLOCK8 = 256, BLOCK4 = 128, BLOCK1 = 256, LANES = 16, LARGEST_BLOCK = 256 };
enum { RECORD8 = HEAD + BLOCK8, RECORD4 = HEAD + BLOCK4 / 2, RECORD1 = HEAD + BLOCK1 / 8 };

static const uint32_t MAGNITUDE = 0x7fffffff, SIGN = 0x80000000, NOT_A_NUMBER = 0x7fc00000;
static const float TINY = 0x1p-118f;          /* below, 1 / step would overflow */
static const float HUGE = 0x1p118f;           /* from here on, a block counts as not finite */
static const float TO_WHOLE = 12582912.0f;    /* 1.5 * 2^23: adding it rounds to a whole number, halves to even */

INLINED uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINED float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

/* A step is a bfloat16, the upper half of an fp32, so that a step times a code is exact. */
INLINED void write_step(uint8_t *record, float step) { uint16_t half = bits_of(step) >> 16; memcpy(record, &half, HEAD); }
INLINED float read_step(const uint8_t *record) { uint16_t half; memcpy(&half, record, HEAD); return float_of((uint32_t)half << 16); }

/* The largest magnitude. Compared as integers, so NaN is the largest. */
INLINED float largest_of(const float *v, int block)
{
    int32_t largest = 0;
    for (int i = 0; i < block; i++) {
        int32_t magnitude = (int32_t)(bits_of(v[i]) & MAGNITUDE);
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of((uint32_t)largest);
}

/* The smallest bfloat16 step with step x levels >= the largest magnitude; NaN where a value is HUGE or not finite. */
INLINED float step_of(const float *v, int block, float levels)
{
    const float top = largest_of(v, block);
    if (!(top < HUGE))
        return float_of(NOT_A_NUMBER);
    return top < TINY ? 0.0f : float_of((bits_of(top / levels) + 0xffff) & 0xffff0000u);
}

/* The mean magnitude of `count` values (zeros follow) as a bfloat16, added up in LANES partial sums; NaN where one is huge or
 * not finite. */
INLINED float mean_of(const float *v, int count)
{
    if (!(largest_of(v, BLOCK1) < HUGE))
        return float_of(NOT_A_NUMBER);
    float lane[LANES] = {0};
    for (int i = 0; i < BLOCK1; i += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += float_of(bits_of(v[i + l]) & MAGNITUDE);
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++)
            lane[l] += lane[l + width];
    return float_of((bits_of(lane[0] / (float)count) + 0x8000) & 0xffff0000u);
}

/* Codes of v: whole numbers of steps. `left` becomes the error. */
INLINED void whole_steps(const float *v, float step, int block, int8_t *codes, float *left)
{
    const float per_step = step > 0.0f ? 1.0f / step : 0.0f;
    for (int i = 0; i < block; i++) {
        float shifted = v[i] * per_step + TO_WHOLE;
        codes[i] = (int8_t)(bits_of(shifted) - bits_of(TO_WHOLE));
        left[i] = v[i] - (shifted - TO_WHOLE) * step;
    }
}

/* Each encoder writes the record of one block, whose values after the first `count` are padding, and its error, `left`. It returns
 * whether the block was finite. */
INLINED int encode8(const float *v, int count, uint8_t *record, float *left)
{
    (void)count;
    const float step = step_of(v, BLOCK8, 127.0f);
    write_step(record, step);
    if (step != step) {
        memset(record + HEAD, 0, BLOCK8);
        return 0;
    }
    int8_t codes[BLOCK8];
    whole_steps(v, step, BLOCK8, codes, left);
    memcpy(record + HEAD, codes, BLOCK8);
    return 1;
}

INLINED int encode4(const float *v, int count, uint8_t *record, float *left)
{
    (void)count;
    const float step = step_of(v, BLOCK4, 7.0f);
    write_step(record, step);
    if (step != step) {
        memset(record + HEAD, 0x88, BLOCK4 / 2);   /* twice the code of zero */
        return 0;
    }
    int8_t codes[BLOCK4];
    whole_steps(v, step, BLOCK4, codes, left);
    for (int i = 0; i < BLOCK4 / 2; i++)
        record[HEAD + i] = (uint8_t)((codes[i] + 8) | (codes[i + BLOCK4 / 2] + 8) << 4);
    return 1;
}

INLINED int encode1(const float *v, int count, uint8_t *record, float *left)
{
    const float mean = mean_of(v, count);
    uint32_t packed[BLOCK1 / 8] = {0};
    write_step(record, mean);
    if (mean == mean)
        for (int bit = 0; bit < 8; bit++)
            for (int i = 0; i < BLOCK1 / 8; i++) {
                const float value = v[bit * (BLOCK1 / 8) + i];
                const uint32_t sign = bits_of(value) & SIGN;
                packed[i] |= sign >> (31 - bit);
                left[bit * (BLOCK1 / 8) + i] = value - float_of(bits_of(mean) | sign);
            }
    for (int i = 0; i < BLOCK1 / 8; i++)
        record[HEAD + i] = (uint8_t)packed[i];
    return mean == mean;
}

/* Each decoder adds the values of one record to v. */
INLINED void add8(const uint8_t *record, float *v)
{
    const float step = read_step(record);
    int8_t codes[BLOCK8];
    memcpy(codes, record + HEAD, BLOCK8);
    for (int i = 0; i < BLOCK8; i++)
        v[i] += (float)codes[i] * step;
}

INLINED void add4(const uint8_t *record, float *v)
{
    const float step = read_step(record);
    for (int i = 0; i < BLOCK4 / 2; i++) {
        v[i] += (float)((record[HEAD + i] & 15) - 8) * step;
        v[i + BLOCK4 / 2] += (float)((record[HEAD + i] >> 4) - 8) * step;
    }
}

INLINED void add1(const uint8_t *record, float *v)
{
    const uint32_t mean = bits_of(read_step(record));
    uint32_t packed[BLOCK1 / 8];
    for (int i = 0; i < BLOCK1 / 8; i++)
        packed[i] = record[HEAD + i];
    for (int bit = 0; bit < 8; bit++)
        for (int i = 0; i < BLOCK1 / 8; i++)
            v[bit * (BLOCK1 / 8) + i] += float_of(mean | (packed[i] << (31 - bit) & SIGN));
}

/* The three passes over memory, for one format. A block that is full has a constant length, which compilers make the most of. */
#define PASSES(BITS)                                                                                                   \
    /* The record of `count` values, with what was left of them before; zeros follow them. */                          \
    INLINED void encode_with_error##BITS(float *v, int count, float *error, uint8_t *out)                              \
    {                                                                                                                  \
        float left[BLOCK##BITS];                                                                                       \
        for (int i = 0; i < count; i++)                                                                                \
            v[i] += error[i];                                                                                          \
        if (encode##BITS(v, count, out, left))                                                                         \
            memcpy(error, left, count * sizeof(float));                                                                \
    }                                                                                                                  \
    CLONED static void quantise##BITS(const float *x, float *error, uint8_t *out, Py_ssize_t n)                        \
    {                                                                                                                  \
        float v[BLOCK##BITS] = {0};                                                                                    \
        for (; n >= BLOCK##BITS; n -= BLOCK##BITS, x += BLOCK##BITS, error += BLOCK##BITS, out += RECORD##BITS) {      \
            memcpy(v, x, sizeof v);                                                                                    \
            encode_with_error##BITS(v, BLOCK##BITS, error, out);                                                       \
        }                                                                                                              \
        if (!n)                                                                                                        \
            return;                                                                                                    \
        memset(v, 0, sizeof v);                                                                                        \
        memcpy(v, x, n * sizeof(float));                                                                               \
        encode_with_error##BITS(v, (int)n, error, out);                                                                \
    }                                                                                                                  \
    INLINED void sum##BITS(const uint8_t *inbox, Py_ssize_t ranks, Py_ssize_t blocks, float *v)                        \
    {                                                                                                                  \
        memset(v, 0, BLOCK##BITS * sizeof(float));                                                                     \
        for (Py_ssize_t rank = 0; rank < ranks; rank++)                                                                \
            add##BITS(inbox + rank * blocks * RECORD##BITS, v);                                                        \
    }                                                                                                                  \
    CLONED static void fold##BITS(const uint8_t *inbox, Py_ssize_t ranks, Py_ssize_t blocks, float *error, uint8_t *out, Py_ssize_t n)\
    {                                                                                                                  \
        float v[BLOCK##BITS];                                                                                          \
        for (; n >= BLOCK##BITS; n -= BLOCK##BITS, inbox += RECORD##BITS, error += BLOCK##BITS, out += RECORD##BITS) { \
            sum##BITS(inbox, ranks, blocks, v);                                                                        \
            encode_with_error##BITS(v, BLOCK##BITS, error, out);                                                       \
        }                                                                                                              \
        if (!n)                                                                                                        \
            return;                                                                                                    \
        sum##BITS(inbox, ranks, blocks, v);                                                                            \
        memset(v + n, 0, (BLOCK##BITS - n) * sizeof(float));   /* with 1 bit, padding came out as the step */          \
        encode_with_error##BITS(v, (int)n, error, out);                                                                \
    }                                                                                                                  \
    CLONED static void dequantise##BITS(const uint8_t *wire, float *x, Py_ssize_t n)                                   \
    {                                                                                                                  \
        for (Py_ssize_t at = 0; at < n; at += BLOCK##BITS, wire += RECORD##BITS) {                                     \
            float v[BLOCK##BITS] = {0};                                                                                \
            add##BITS(wire, v);                                                                                        \
            memcpy(x + at, v, (n - at < BLOCK##BITS ? n - at : BLOCK##BITS) * sizeof(float));                          \
        }                                                                                                              \
    }

PASSES(8)
PASSES(4)
PASSES(1)

/* ------------------------------------------------------------------ what Python calls */

typedef struct {
    int bits, block, record;
    void (*quantise)(const float *, float *, uint8_t *, Py_ssize_t);
    void (*fold)(const uint8_t *, Py_ssize_t, Py_ssize_t, float *, uint8_t *, Py_ssize_t);
    void (*dequantise)(const uint8_t *, float *, Py_ssize_t);
} Format;

static const Format FORMATS[] = {
    {8, BLOCK8, RECORD8, quantise8, fold8, dequantise8},
    {4, BLOCK4, RECORD4, quantise4, fold4, dequantise4},
    {1, BLOCK1, RECORD1, quantise1, fold1, dequantise1},
};

static const Format *format_of(int bits)
{
    for (size_t at = 0; at < sizeof FORMATS / sizeof *FORMATS; at++)
        if (FORMATS[at].bits == bits)
            return &FORMATS[at];
    PyErr_Format(PyExc_ValueError, "there is no format of %d bits", bits);
    return NULL;
}

static int expect_bytes(const char *what, const Py_buffer *held, Py_ssize_t expected)
{
    if (held->len != expected)
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, expected %zd", what, held->len, expected);
    return held->len == expected;
}

static PyObject *py_quantise(PyObject *module, PyObject *args)
{
    Py_buffer x, error, out;
    int bits;
    if (!PyArg_ParseTuple(args, "iy*w*w*", &bits, &x, &error, &out))
        return NULL;
    const Format *format = format_of(bits);
    const Py_ssize_t n = x.len / (Py_ssize_t)sizeof(float), blocks = format ? (n + format->block - 1) / format->block : 0;
    const int fine = format && expect_bytes("out", &out, blocks * format->record) && expect_bytes("error", &error, x.len);
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        format->quantise(x.buf, error.buf, out.buf, n);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&error);
    PyBuffer_Release(&out);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *py_fold(PyObject *module, PyObject *args)
{
    Py_buffer inbox, error, out;
    int bits;
    Py_ssize_t ranks;
    if (!PyArg_ParseTuple(args, "iy*nw*w*", &bits, &inbox, &ranks, &error, &out))
        return NULL;
    const Format *format = format_of(bits);
    const Py_ssize_t blocks = format ? out.len / format->record : 0;
    int fine = ranks >= 0 && ranks <= PY_SSIZE_T_MAX / (out.len + 1);   /* otherwise the number of bytes would overflow */
    if (format && !fine)
        PyErr_Format(PyExc_ValueError, "there is no inbox of %zd ranks", ranks);
    const Py_ssize_t n = error.len / (Py_ssize_t)sizeof(float), most = format ? blocks * format->block : 0;
    fine = fine && format && expect_bytes("out", &out, blocks * format->record) && expect_bytes("inbox", &inbox, ranks * out.len)
        && expect_bytes("error", &error, (n < most ? n : most) * (Py_ssize_t)sizeof(float));
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        format->fold(inbox.buf, ranks, blocks, error.buf, out.buf, n);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&inbox);
    PyBuffer_Release(&error);
    PyBuffer_Release(&out);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyObject *py_dequantise(PyObject *module, PyObject *args)
{
    Py_buffer wire, x;
    int bits;
    if (!PyArg_ParseTuple(args, "iy*w*", &bits, &wire, &x))
        return NULL;
    const Format *format = format_of(bits);
    const Py_ssize_t n = x.len / (Py_ssize_t)sizeof(float), blocks = format ? (n + format->block - 1) / format->block : 0;
    const int fine = format && expect_bytes("wire", &wire, blocks * format->record);
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        format->dequantise(wire.buf, x.buf, n);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&wire);
    PyBuffer_Release(&x);
    return fine ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef METHODS[] = {
    {"quantise", py_quantise, METH_VARARGS, "quantise(bits, x, error, out)"},
    {"fold", py_fold, METH_VARARGS, "fold(bits, inbox, ranks, error, out)"},
    {"dequantise", py_dequantise, METH_VARARGS, "dequantise(bits, wire, x)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_quantize", "The inner loops of comm/quantize.py.", -1, METHODS,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__quantize(void) { return PyModule_Create(&MODULE); }
