"""Why the driver does not let this process open another one's memory by a legacy handle, and what helps.

Which processes may, is documented nowhere, and reports disagree about containers. So nothing is assumed: the
handle is tried, and the driver's answer is put into words here.
"""

from typing import Final

from kvtier_kernels.cuda import CudaError

_APART: Final = (
    "the engine and kvtierd are most likely in PID namespaces of their own: give both the host's (in "
    "Kubernetes hostPID, in Docker --pid=host), or let the engine allocate with expandable_segments:True, "
    "whose memory is shared by descriptors"
)
_FORBIDDEN: Final = (
    "CUDA IPC is not possible here, as under WSL, vGPU, a sandbox or a seccomp profile: let the engine "
    "allocate with expandable_segments:True, or go on with the mirror"
)

ADVICE: Final = {
    1: "the handle means nothing to the driver here: are engine and kvtierd on one machine, with one version "
    "of the driver's library?",
    201: _APART,
    205: f"either the engine has just ended, or it is another user's, or {_APART}",
    400: f"the handle is not known to the driver here. {_APART.capitalize()}",
    800: _FORBIDDEN,
    801: _FORBIDDEN,
    999: _FORBIDDEN,
}
"""By the driver's error code, for those with which it refuses to open memory that may well exist. 999 says
nothing, and is given where a container does not let a handle through."""


def is_refused(error: CudaError) -> bool:
    """Whether cuIpcOpenMemHandle has failed with an error that a mirror in the host's memory gets around."""
    return error.code in ADVICE and not error.sticky


def explain(error: CudaError) -> str:
    """What the driver has said, the likely cause, and what to change."""
    return (
        f"the driver does not let kvtierd open this memory ({error.name}, {error.code}): {ADVICE[error.code]}"
    )
