"""A worker for the CPU loads nothing of CUDA's, not even our binding."""

import subprocess
import sys


def test_a_worker_for_the_cpu_imports_nothing_of_cuda() -> None:
    program = (
        "import sys, kvtierd.workers.copy.__main__, kvtierd.workers.copy.cpu\n"
        "print([name for name in sys.modules if 'cuda' in name or 'worker.gpu' in name or 'torch' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
