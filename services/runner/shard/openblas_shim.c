/* MLX's matrix products, handed to a BLAS that MLX was not linked with.
 *
 * Loaded with RTLD_GLOBAL before MLX, these names come first in the search for MLX's cblas symbols. The
 * library behind them is named at run time, with the prefix its symbols carry ("scipy_" or none), so this
 * file needs no BLAS to be compiled. A product with one row is a matrix-vector product: asked for as such
 * it runs at the memory's speed, which a general product of that shape does not reach. It runs on one thread:
 * a second one gains a tenth where every core is free, and loses all but a fraction where one is not, for the
 * threads of so short a product wait for each other.
 *
 * Products of few rows with a transposed matrix, which are what a step of decoding is made of, are made here where
 * the processor has AVX2: a BLAS takes twice as long for two rows as for one. Also on one thread, so fewer of them
 * if the BLAS has two, and but one row if it has more, which nobody measured.
 */
#include <dlfcn.h>
#include <stddef.h>
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

#if defined(__x86_64__)

/* Reading the matrix is what a product of few rows costs, so each of its rows is read once, and all rows of the
 * other factor are multiplied with it. Every sum is made in the same order, whatever is computed beside it: a row
 * has the same bits alone and among others.
 */
enum { FEW = 8, FEW_FOR_TWO_THREADS = 4, LANES = 8, SUMS = 12, LINE = 16, LINES_AHEAD = 4 };

#define WIDE __attribute__((target("avx2,fma")))
#define WIDE_INLINE WIDE inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

struct product {
    int m, n, k;
    float alpha;
    const float *a;
    int lda;
    const float *b;
    int ldb;
    float beta;
    float *c;
    int ldc;
};

/* The most rows of a product that are multiplied faster here than by a BLAS with so many threads. */
static int few_rows(int threads)
{
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    if (threads > 2)
        return 1;
    return threads == 2 ? FEW_FOR_TWO_THREADS : FEW;
}

/* `rows` by `columns` of c, from row `i` and column `j` on. Both are constants where this is inlined, and their
 * product is at most SUMS: that many sums, and what is multiplied, fit into the processor's registers.
 */
static WIDE_INLINE void block(const struct product *p, int i, int rows, int j, int columns)
{
    const float *a = p->a + (size_t)i * p->lda, *b = p->b + (size_t)j * p->ldb;
    const size_t lda = p->lda, ldb = p->ldb;
    const int k = p->k, whole = k - k % LANES;
    lanes sums[SUMS] = {{0}};
    /* The processor foresees how a row goes on, not where the next ones begin. */
    for (int column = 0; i == 0 && column < columns; column++)
        for (int line = 0; line < LINES_AHEAD; line++)
            __builtin_prefetch(b + (columns + column) * ldb + line * LINE);
    for (int l = 0; l < whole; l += LANES)
#pragma GCC unroll 8
        for (int column = 0; column < columns; column++) {
            lanes weights = *(const lanes *)(b + column * ldb + l);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++)
                sums[row * columns + column] += weights * *(const lanes *)(a + row * lda + l);
        }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int column = 0; column < columns; column++) {
            lanes s = sums[row * columns + column];
            float sum = ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
            for (int l = whole; l < k; l++)
                sum = __builtin_fmaf(a[row * lda + l], b[column * ldb + l], sum);
            float *c = p->c + (size_t)(i + row) * p->ldc + j + column;
            *c = p->alpha * sum + (p->beta == 0 ? 0 : p->beta * *c);
        }
}

/* All of c, `columns` at a time: first `rows` rows of them, then `more` rows of the same ones, now in the cache. */
static WIDE_INLINE void blocks(const struct product *p, int rows, int more, int columns)
{
    int j = 0;
    for (; j + columns <= p->n; j += columns) {
        block(p, 0, rows, j, columns);
        block(p, rows, more, j, columns);
    }
    for (; j < p->n; j++) {
        block(p, 0, rows, j, 1);
        block(p, rows, more, j, 1);
    }
}

static WIDE void multiply_few_rows(const struct product *p)
{
    switch (p->m) {
    case 1: blocks(p, 1, 0, 8); break;
    case 2: blocks(p, 2, 0, 6); break;
    case 3: blocks(p, 3, 0, 4); break;
    case 4: blocks(p, 4, 0, 3); break;
    case 5: blocks(p, 4, 1, 3); break;
    case 6: blocks(p, 4, 2, 3); break;
    case 7: blocks(p, 4, 3, 3); break;
    case FEW: blocks(p, 4, 4, 3); break;
    }
}

#endif

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
    int threads = get_threads && set_threads ? get_threads() : 1;
    products++;
#if defined(__x86_64__)
    if (m <= few_rows(threads) && order == ROW_MAJOR && transpose_a == NO_TRANSPOSE && transpose_b == TRANSPOSE) {
        multiply_few_rows(&(struct product){m, n, k, alpha, a, lda, b, ldb, beta, c, ldc});
        return;
    }
#endif
    if (m == 1 && order == ROW_MAJOR) {
        int stride = transpose_a == NO_TRANSPOSE ? 1 : lda;
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
