"""Runs vLLM's own tests of connectors against ours: python -m tools.vllm_suites

They are not in vLLM's wheels and not copied into this repository: pip fetches the source distribution of the
installed vLLM into build/vllm-suites, once. A daemon runs beside them.

In tests/v1/kv_connector/unit, the tests in `SUITES` can be pointed to any connector, and are run. The others
test one connector of vLLM's each (NIXL, Mooncake, MoRIIO, LMCache, FlexKV, HF3FS, HiSparse, offloading,
example, hidden states, decode bench), the options of vLLM that name connectors (test_config,
test_hma_auto_config), or parts without any connector (test_output_aggregator, test_tp_mapping,
test_scheduler_kv_connector_override). test_multi_connector needs a GPU for its engines and example connectors
for its counts; see tests/vllm/test_multi_connector.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.daemon import DaemonHost
from tools import tiny_llama
from tools.stages import REPO

SUITES = (
    "test_kv_connector_lifecycle.py",
    "test_kv_load_failure_recovery.py",
    "test_invalid_blocks_correctness.py",
    "test_cache_pollution_prevention.py",
    "test_error_propagation.py",
)
UNIT = Path("tests/v1/kv_connector/unit")
BUILD = REPO / "build" / "vllm-suites"
FETCH_DEADLINE_S, TESTS_DEADLINE_S = 900, 900


def fetch(version: str) -> Path:
    """Returns the folder with the tests of a vLLM release. Raises RuntimeError if it cannot be fetched."""
    home = BUILD / version
    if (home / UNIT / SUITES[0]).exists():
        return home
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        # Without vLLM's build tools pip fails after it has unpacked the archive, which is all that is needed.
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-clean", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "-d", scratch, f"vllm=={version}"]
        subprocess.run(
            command,
            env=os.environ | {"TMPDIR": scratch},
            timeout=FETCH_DEADLINE_S,
            capture_output=True,
            check=False,
        )
        found = next(Path(scratch).glob(f"*/*/{UNIT}"), None)
        if found is None:
            raise RuntimeError(f"pip could not fetch the source distribution of vLLM {version}")
        partial = home.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        (partial / UNIT.parent).mkdir(parents=True)
        shutil.copytree(found, partial / UNIT)
        folder = partial / UNIT.parent
        while folder != partial:  # packages, as in vLLM's tree, without its conftest of everything
            (folder / "__init__.py").touch()
            folder = folder.parent
        shutil.rmtree(home, ignore_errors=True)
        partial.rename(home)
    return home


def main() -> int:
    """Runs the tests. Returns pytest's exit status."""
    import vllm

    BUILD.mkdir(parents=True, exist_ok=True)
    home = fetch(vllm.__version__.split("+")[0])
    model = tiny_llama.ensure(BUILD / "tiny", tiny_llama.PRESETS["tiny"])
    run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    host = DaemonHost(run, run / "pool", pool__size="64MiB")
    host.start()
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "kvtier_suite_plugin"]
        command += ["-p", "no:cacheprovider", "-W", "ignore", "-c", os.devnull, f"--rootdir={home}"]
        return subprocess.run(
            [*command, *(str(UNIT / name) for name in SUITES)],
            cwd=home,
            env=os.environ
            | {
                "PYTHONPATH": f"{home}:{REPO / 'tests/vllm/suites'}",
                "KVTIER_SUITE_MODEL": str(model),
                "KVTIER_SUITE_SOCKET": str(host.socket),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "HF_HUB_OFFLINE": "1",
            },
            timeout=TESTS_DEADLINE_S,
            check=False,
        ).returncode
    finally:
        host.stop()
        shutil.rmtree(run)


if __name__ == "__main__":
    sys.exit(main())
