/* MLX's matrix products, handed to a BLAS that MLX was not linked with.
 *
 * Loaded with RTLD_GLOBAL before MLX, these names come first in the search for MLX's cblas symbols. The
 * library behind them is named at run time, with the prefix its symbols carry ("scipy_" or none), so this
 * file needs no BLAS to be compiled. A product with one row is a matrix-vector product: asked for as such
 * it runs at the memory's speed, which a general product of that shape does not reach. It runs on one thread:
 * a second one gains a tenth where every core is free, and loses all but a fraction where one is not, for the
 * threads of so short a product wait for each other.
 */
#include <dlfcn.h>
#include <stdio.h>

enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111, TRANSPOSE = 112 };

typedef void (*sgemm_function)(int, int, int, int, int, int, float, const float *, int, const float *, int, float,
                               float *, int);
typedef void (*dgemm_function)(int, int, int, int, int, int, double, const double *, int, const double *, int, double,
                               double *, int);
typedef void (*cgemm_function)(int, int, int, int, int, int, const void *, const void *, int, const void *, int,
                               const void *, void *, int);
typedef void (*sgemv_function)(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

typedef int (*get_threads_function)(void);
typedef void (*set_threads_function)(int);

static sgemm_function sgemm;
static dgemm_function dgemm;
static cgemm_function cgemm;
static sgemv_function sgemv;
static get_threads_function get_threads;
static set_threads_function set_threads;
static unsigned long products;

static void *symbol(void *library, const char *prefix, const char *name)
{
    char full_name[64];
    snprintf(full_name, sizeof full_name, "%s%s", prefix, name);
    return dlsym(library, full_name);
}

/* Takes the library at `path`. Returns 0, or -1 when it cannot be loaded or lacks a function. */
int ullage_blas_bind(const char *path, const char *prefix)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return -1;
    sgemm = (sgemm_function)symbol(library, prefix, "cblas_sgemm");
    dgemm = (dgemm_function)symbol(library, prefix, "cblas_dgemm");
    cgemm = (cgemm_function)symbol(library, prefix, "cblas_cgemm");
    sgemv = (sgemv_function)symbol(library, prefix, "cblas_sgemv");
    /* Not every BLAS has these; without them its own choice stands. */
    get_threads = (get_threads_function)symbol(library, prefix, "openblas_get_num_threads");
    set_threads = (set_threads_function)symbol(library, prefix, "openblas_set_num_threads");
    return sgemm && dgemm && cgemm && sgemv ? 0 : -1;
}

/* How many single-precision products came this way: tells whether MLX found these names. */
unsigned long ullage_blas_products(void)
{
    return products;
}

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc)
{
    products++;
    if (m == 1 && order == ROW_MAJOR) {
        int stride = transpose_a == NO_TRANSPOSE ? 1 : lda;
        int threads = get_threads && set_threads ? get_threads() : 1;
        if (threads > 1)
            set_threads(1);
        if (transpose_b == NO_TRANSPOSE)
            sgemv(ROW_MAJOR, TRANSPOSE, k, n, alpha, b, ldb, a, stride, beta, c, 1);
        else
            sgemv(ROW_MAJOR, NO_TRANSPOSE, n, k, alpha, b, ldb, a, stride, beta, c, 1);
        if (threads > 1)
            set_threads(threads);
        return;
    }
    sgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, double alpha, const double *a,
                 int lda, const double *b, int ldb, double beta, double *c, int ldc)
{
    dgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha, const void *a,
                 int lda, const void *b, int ldb, const void *beta, void *c, int ldc)
{
    cgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
