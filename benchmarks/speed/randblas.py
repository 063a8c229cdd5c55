"""How fast is a projection whose matrix is not stored beside RandBLAS, which computes its entries on the way too?

100,000 inputs, 2,048 outputs, batches of 1,024 and of 64, one thread and two. RandBLAS sketches by a dense Gaussian
operator, whose entries it computes by Philox as this package does, in blocks of 1,024 columns: the fastest of those
that were tried, within little memory. Both are measured against a product with a stored matrix, as in
`benchmarks.speed.matrix_free`. Required: at least the rate of RandBLAS.

RandBLAS needs a C++20 compiler, BLAS++ and Random123. With Intel's BLAS, which torch has too:

    pip install mkl
    git clone https://github.com/BallisticLA/RandBLAS
    git clone https://github.com/icl-utk-edu/blaspp
    git clone https://github.com/DEShawResearch/random123
    LIB=$(dirname $(find / -name libmkl_core.so.3 | head -1))
    BLAS="-L$LIB -Wl,-rpath,$LIB -l:libmkl_intel_lp64.so.3 -l:libmkl_gnu_thread.so.3 -l:libmkl_core.so.3 -lgomp"
    cmake -S blaspp -B build -Dbuild_tests=OFF -Dgpu_backend=none -DBLAS_LIBRARIES="$BLAS" \
        -DCMAKE_INSTALL_PREFIX=$PWD/blaspp-install && make -C build install
    python -m benchmarks.speed.randblas . --libraries $LIB
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.markdown import command, markdown, section, verdict
from benchmarks.results_file import load_results, save_results
from benchmarks.speed.matrix_free import BARS, DEPTH, N_OUTPUTS, SLICE
from benchmarks.timing import interleaved
from opusim.medium.transmission import Medium
from opusim.tables import print_table

MODULE, NAME = "benchmarks.speed.randblas", "randblas"
N_INPUTS, BLOCK, REPEATS = 10**5, 1024, 5
COLUMNS = (
    "threads",
    "batch",
    "opusim [s]",
    "RandBLAS [s]",
    "times as fast",
    "at least 1",
    "product of as many [s]",
)
SOURCE = """
#include <RandBLAS.hh>
extern "C" void sketch(const float* x, float* y, long batch, long inputs, long outputs, long block, unsigned seed) {
    RandBLAS::DenseSkOp<float> matrix(RandBLAS::DenseDist(outputs, inputs), RandBLAS::RNGState<>(seed));
    for (long first = 0; first < inputs; first += block)
        RandBLAS::sketch_general(blas::Layout::RowMajor, blas::Op::NoTrans, blas::Op::Trans, outputs, batch,
            std::min(block, inputs - first), 1.0f, matrix, 0, first, x + first, inputs, first ? 1.0f : 0.0f, y, batch);
}
"""


def built(folder: Path, libraries: Path, into: Path) -> ctypes.CDLL:
    """Return a library that sketches by RandBLAS, compiled from checkouts in a folder.

    Raises:
        subprocess.CalledProcessError: It does not compile; the compiler says why.
    """
    headers = into / "include" / "RandBLAS"
    headers.mkdir(parents=True)
    (headers / "config.h").write_text("#define RandBLAS_HAS_OpenMP\n")
    (into / "sketch.cc").write_text(SOURCE)
    installed = folder / "blaspp-install"
    include = [into / "include", folder / "RandBLAS", folder / "random123" / "include", installed / "include"]
    call: list[str | Path] = ["g++", "-std=c++20", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    call += [into / "sketch.cc", "-o", into / "sketch.so", *(f"-I{path}" for path in include)]
    call += [
        f"-L{installed / 'lib'}",
        "-lblaspp",
        *(f"-Wl,-rpath,{p}" for p in (installed / "lib", libraries)),
    ]
    subprocess.run(call, check=True)
    return ctypes.CDLL(str(into / "sketch.so"))


def sketched(library: ctypes.CDLL, x: Tensor, outputs: int, block: int = BLOCK) -> Tensor:
    """Return the projection of float32 rows (batch, inputs) by a Gaussian matrix of RandBLAS: (outputs, batch)."""
    y = torch.empty(outputs, len(x))
    pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
    library.sketch(*pointers, *map(ctypes.c_long, (len(x), x.shape[1], outputs, block)), ctypes.c_uint(1))
    return y


def check(library: ctypes.CDLL) -> None:
    """Raise ArithmeticError unless the matrix is Gaussian, unit variance, and the same in blocks of any width."""
    matrix = sketched(library, torch.eye(512), 2000, 100)
    error = 2**-0.5 / matrix.numel() ** 0.5  # of the standard deviation
    if not torch.equal(matrix, sketched(library, torch.eye(512), 2000)) or abs(matrix.std() - 1) > 5 * error:
        raise ArithmeticError("the matrix of RandBLAS is not what was meant")


def measure(library: ctypes.CDLL, threads: int, batch: int) -> dict[str, Any]:
    """Return the seconds of both projections, and of a stored product with as many entries."""
    torch.set_num_threads(threads)
    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)
    x = torch.randint(-1, 2, (batch, N_INPUTS), generator=torch.Generator().manual_seed(1)).float()
    medium, matrix, part = (
        Medium(N_INPUTS, N_OUTPUTS, 1),
        torch.randn(DEPTH, SLICE),
        x[:, :DEPTH].contiguous(),
    )
    seconds = interleaved(
        {
            "opusim": lambda: medium.project(x, range(SLICE)),
            "randblas": lambda: sketched(library, x, SLICE),
            "product": lambda: part @ matrix,
        },
        repeats=REPEATS,
        warm_up=1,
    )
    seconds["product"] *= N_INPUTS / DEPTH
    return {"threads": threads, "batch": batch, **seconds}


def table_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line for each number of threads and batch, as text."""
    return [
        (
            str(row["threads"]),
            str(row["batch"]),
            *(f"{row[name]:.2f}" for name in ("opusim", "randblas")),
            f"{(faster := row['randblas'] / row['opusim']):.2f}",
            verdict(faster >= 1),
            f"{row['product']:.2f}",
        )
        for row in rows
    ]


def page_section() -> str:
    """Return the section of the result pages."""
    results = load_results(NAME)
    text = (
        f"{N_INPUTS:,} inputs to {SLICE:,} outputs ({results['date']}, RandBLAS {results['randblas']}): seconds of a "
        "projection whose matrix is computed on the way, and of products with a stored matrix of as many entries."
    )
    return section(
        "Projections beside RandBLAS", text, command(MODULE), markdown(COLUMNS, table_rows(results["rows"]))
    )


def main(
    folder: Annotated[Path, typer.Argument(help="Holds RandBLAS, random123 and blaspp-install.")],
    libraries: Annotated[Path, typer.Option(help="Folder of the BLAS libraries.")],
) -> None:
    """Build, check and time."""
    with tempfile.TemporaryDirectory() as into:
        library = built(folder.resolve(), libraries.resolve(), Path(into))
        check(library)
        rows = [measure(library, threads, batch) for batch in BARS for threads in (1, 2)]
    version = ["git", "-C", str(folder / "RandBLAS"), "log", "-1", "--format=%h of %cs"]
    found = subprocess.run(version, check=True, capture_output=True, text=True).stdout.strip()
    print_table("Projections without a stored matrix", COLUMNS, table_rows(rows))
    save_results(NAME, {"repeats": REPEATS, "randblas": found, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
