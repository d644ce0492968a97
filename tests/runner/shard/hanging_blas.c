/* A BLAS that computes, slowly, until the file named by ULLAGE_TEST_HANG and the process's number is there; then a
 * product rests for ever, or where the file begins with "s" spins for ever. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void hang_if_told(void)
{
    char path[4096], how = 0;
    snprintf(path, sizeof path, "%s.%d", getenv("ULLAGE_TEST_HANG"), (int)getpid());
    int file = open(path, O_RDONLY);
    if (file < 0)
        return;
    read(file, &how, 1);
    for (volatile int spins = how == 's';;)
        if (!spins)
            pause();
}

void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc)
{
    hang_if_told();
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++)
                sum += a[transpose_a == 111 ? i * lda + l : l * lda + i] *
                       b[transpose_b == 111 ? l * ldb + j : j * ldb + l];
            c[i * ldc + j] = alpha * sum + (beta == 0 ? 0 : beta * c[i * ldc + j]);
        }
    (void)order;
}

void cblas_sgemv(int order, int transpose, int m, int n, float alpha, const float *a, int lda, const float *x, int stride,
                 float beta, float *y, int stride_y)
{
    hang_if_told();
    int rows = transpose == 111 ? m : n, columns = transpose == 111 ? n : m;
    for (int i = 0; i < rows; i++) {
        float sum = 0;
        for (int l = 0; l < columns; l++)
            sum += a[transpose == 111 ? i * lda + l : l * lda + i] * x[l * stride];
        y[i * stride_y] = alpha * sum + (beta == 0 ? 0 : beta * y[i * stride_y]);
    }
    (void)order;
}

/* Never called by what the tests compute. */
void cblas_dgemm(void) { abort(); }
void cblas_cgemm(void) { abort(); }
