/* The inner loop of comm/sparse.py: which values of a large buffer are candidates for the largest. Read that file first. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && defined(__x86_64__) && defined(__GLIBC__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif

enum { BLOCK = 32 };   /* most blocks hold no candidate: their largest magnitude shows it */

static inline int32_t magnitude_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits & 0x7fffffff;
}

/* x += error; `places` gets the places of all magnitudes >= bound. Magnitudes are compared as integers, so infinity and NaN are
 * the largest. */
CLONED static Py_ssize_t absorb(float *x, const float *error, float bound, int32_t *places, Py_ssize_t n)
{
    const int32_t least = magnitude_of(bound);
    Py_ssize_t count = 0;
    for (Py_ssize_t at = 0; at < n; at += BLOCK) {
        const int width = n - at < BLOCK ? (int)(n - at) : BLOCK;
        int32_t largest = 0;
        if (width == BLOCK)
            for (int i = 0; i < BLOCK; i++) {
                x[at + i] += error[at + i];
                const int32_t magnitude = magnitude_of(x[at + i]);
                largest = magnitude > largest ? magnitude : largest;
            }
        else
            for (int i = 0; i < width; i++) {
                x[at + i] += error[at + i];
                const int32_t magnitude = magnitude_of(x[at + i]);
                largest = magnitude > largest ? magnitude : largest;
            }
        if (largest >= least)
            for (int i = 0; i < width; i++) {
                places[count] = (int32_t)(at + i);
                count += magnitude_of(x[at + i]) >= least;
            }
    }
    return count;
}

static PyObject *py_absorb(PyObject *module, PyObject *args)
{
    Py_buffer x, error, places;
    float bound;
    Py_ssize_t count = -1;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*fw*", &x, &error, &bound, &places))
        return NULL;
    if (x.len != error.len || places.len != x.len + 4)
        PyErr_Format(PyExc_ValueError, "x, error and places have %zd, %zd and %zd bytes; expected two of one size, and one value more",
                     x.len, error.len, places.len);
    else {
        Py_BEGIN_ALLOW_THREADS
        count = absorb(x.buf, error.buf, bound, places.buf, x.len / (Py_ssize_t)sizeof(float));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&error);
    PyBuffer_Release(&places);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

static PyMethodDef METHODS[] = {
    {"absorb", py_absorb, METH_VARARGS, "absorb(x, error, bound, places) -> how many places"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_sparse", "The inner loop of comm/sparse.py.", -1, METHODS,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sparse(void) { return PyModule_Create(&MODULE); }
