"""What a worker finds in its environment."""

from pathlib import Path

import pytest
from kvtierd.workers.supervisor.kinds import MPS_PIPES, NO_MPS, VISIBLE, gpu_environment

GPU = "GPU-0000beef-0000-0000-0000-000000000001"


def test_a_gpu_s_worker_sees_its_own_gpu_and_no_mps_server() -> None:
    assert gpu_environment(GPU, {"PATH": "/bin"}) == {VISIBLE: GPU, MPS_PIPES: NO_MPS}
    assert not Path(NO_MPS).exists()


@pytest.mark.parametrize(("name", "value"), [(VISIBLE, "0,1"), (VISIBLE, ""), (MPS_PIPES, "/tmp/nvidia-mps")])
def test_what_an_operator_has_set_holds(name: str, value: str) -> None:
    assert name not in gpu_environment(GPU, {name: value})
    assert len(gpu_environment(GPU, {name: value})) == 1
