"""Products of few rows, which the shim makes itself, against numpy's in double precision."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from services.runner.shard import blas

ROW_MAJOR = 101
NO_TRANSPOSE = 111
TRANSPOSE = 112
ROWS = range(1, 10)
PADDING = 3
"""Floats between the rows of each matrix, of which none may be read as a factor or written."""

CPU_INFO = Path("/proc/cpuinfo")

made_by_the_shim = pytest.mark.skipif(
    not CPU_INFO.exists() or "avx2" not in CPU_INFO.read_text(), reason="the shim leaves every product to the BLAS"
)

Matrix = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def shim() -> ctypes.CDLL:
    loaded = blas.load(threads=1)
    if loaded.shim is None:
        pytest.skip("nothing stands between MLX and its BLAS here")
    return loaded.shim


def matrix(rows: int, columns: int) -> Matrix:
    """With NaN between its rows."""
    whole = np.full((rows, columns + PADDING), np.nan, np.float32)
    whole[:, :columns] = np.random.default_rng(rows * 1000 + columns).standard_normal((rows, columns))
    return whole[:, :columns]


def multiply(shim: ctypes.CDLL, a: Matrix, b: Matrix, c: Matrix, alpha: float = 1.0, beta: float = 0.0) -> None:
    """c = alpha a b' + beta c."""

    def at(of: Matrix) -> tuple[ctypes.c_void_p, int]:
        return ctypes.c_void_p(of.ctypes.data), of.strides[0] // of.itemsize

    sizes = (a.shape[0], b.shape[0], a.shape[1])
    scales = ctypes.c_float(alpha), ctypes.c_float(beta)
    shim.cblas_sgemm(ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, *sizes, scales[0], *at(a), *at(b), scales[1], *at(c))


def expected(a: Matrix, b: Matrix) -> npt.NDArray[np.float64]:
    return a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("columns", "width"), [(1, 1), (5, 7), (8, 8), (23, 65), (192, 576), (71, 1537)])
def test_a_product_of_few_rows_is_the_one_of_double_precision(
    shim: ctypes.CDLL, rows: int, columns: int, width: int
) -> None:
    a, b = matrix(rows, width), matrix(columns, width)
    whole = np.full((rows, columns + PADDING), np.nan, np.float32)
    c = whole[:, :columns]
    multiply(shim, a, b, c)
    largest = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64).T
    assert np.all(np.abs(c - expected(a, b)) <= 1e-5 * largest)
    assert np.all(np.isnan(whole[:, columns:]))


@pytest.mark.parametrize("rows", ROWS)
def test_a_product_is_scaled_and_added_to_what_is_there(shim: ctypes.CDLL, rows: int) -> None:
    a, b = matrix(rows, 37), matrix(19, 37)
    c = np.ones((rows, 19), np.float32)
    multiply(shim, a, b, c, alpha=0.5, beta=2.0)
    np.testing.assert_allclose(c, 0.5 * expected(a, b) + 2.0, rtol=1e-5, atol=1e-5)


@made_by_the_shim
@pytest.mark.parametrize(("columns", "width"), [(23, 65), (192, 576), (71, 1537)])
def test_a_row_has_the_same_bits_alone_and_among_others(shim: ctypes.CDLL, columns: int, width: int) -> None:
    a, b = matrix(8, width), matrix(columns, width)
    alone = np.empty((8, columns), np.float32)
    for row in range(8):
        multiply(shim, a[row : row + 1], b, alone[row : row + 1])
    for rows in range(2, 9):
        together = np.empty((rows, columns), np.float32)
        multiply(shim, a[:rows], b, together)
        assert together.tobytes() == alone[:rows].tobytes()


@made_by_the_shim
def test_a_part_of_a_matrix_gives_the_same_bits_as_the_whole(shim: ctypes.CDLL) -> None:
    a, b = matrix(1, 576), matrix(71, 576)
    whole, part = np.empty((1, 71), np.float32), np.empty((1, 30), np.float32)
    multiply(shim, a, b, whole)
    multiply(shim, a, b[11:41], part)
    assert part.tobytes() == whole[:, 11:41].tobytes()
