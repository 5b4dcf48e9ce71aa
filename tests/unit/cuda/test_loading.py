"""Finding the driver, and what is said where none can be used. The drivers here are a few lines of C."""

import pickle
import subprocess
import sys
import threading

import pytest
from kvtier_kernels.cuda import STICKY_CODES, CudaError, CudaUnavailableError, device_name, load

REFUSING_DRIVER = """
int cuDriverGetVersion(int *version) { *version = VERSION; return VERSION_CODE; }
int cuInit(unsigned flags) { return flags ? 1 : INIT_CODE; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : 0;
    return *name ? 0 : 1;
}
"""


@pytest.fixture
def refusing_driver(tmp_path):
    """Makes a driver library that says no at the first question."""

    def make(version=13000, version_code=0, init_code=0):
        source, library = tmp_path / "driver.c", tmp_path / f"libcuda-{version}-{version_code}-{init_code}.so"
        source.write_text(REFUSING_DRIVER)
        definitions = [f"-DVERSION={version}", f"-DVERSION_CODE={version_code}", f"-DINIT_CODE={init_code}"]
        command = ["gcc", "-shared", "-fPIC", *definitions, "-o", library, source]
        subprocess.run(command, check=True, timeout=60)
        return str(library)

    return make


def test_a_missing_library_is_named_with_what_to_do(tmp_path):
    path = str(tmp_path / "libcuda.so.1")
    with pytest.raises(CudaUnavailableError) as refused:
        load(path)
    assert path in str(refused.value)
    assert "install the NVIDIA driver" in str(refused.value)
    assert "KVTIER_CUDA_LIBRARY" in str(refused.value)


def test_the_environment_names_the_library(tmp_path, monkeypatch):
    path = str(tmp_path / "elsewhere.so")
    monkeypatch.setenv("KVTIER_CUDA_LIBRARY", path)
    with pytest.raises(CudaUnavailableError, match=path):
        load()


def test_an_argument_goes_above_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_CUDA_LIBRARY", str(tmp_path / "elsewhere.so"))
    path = str(tmp_path / "here.so")
    with pytest.raises(CudaUnavailableError, match=path):
        load(path)


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("KVTIER_CUDA_LIBRARY", "")
    from kvtier_kernels.cuda.library import library_path

    assert library_path() == "libcuda.so.1"


def test_a_library_that_is_no_driver_is_refused_by_the_function_it_lacks():
    with pytest.raises(CudaUnavailableError, match="has no function cuDriverGetVersion"):
        load("libc.so.6")


def test_a_driver_that_is_too_old_is_refused_with_both_versions(refusing_driver):
    with pytest.raises(
        CudaUnavailableError, match=r"supports CUDA 11\.8; kvtier needs .* CUDA 12\.0 or later"
    ):
        load(refusing_driver(version=11080))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (100, r"cuInit .* CUDA_ERROR_NO_DEVICE \(100\); no GPU is visible"),
        (803, r"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH \(803\); .* different versions"),
        (34, r"\(34\); this is the toolkit's stub library"),
        (12345, r"an error this driver has no name for \(12345\); see whether nvidia-smi works"),
    ],
)
def test_a_driver_that_does_not_start_says_why_and_what_to_do(refusing_driver, code, said):
    with pytest.raises(CudaUnavailableError, match=said):
        load(refusing_driver(init_code=code))


def test_a_driver_that_does_not_tell_its_version_is_refused(refusing_driver):
    with pytest.raises(
        CudaUnavailableError, match=r"cuDriverGetVersion of .* failed: .* \(34\); this is the toolkit's"
    ):
        load(refusing_driver(version_code=34))


def test_a_driver_that_started_but_lacks_a_function_is_refused_by_its_name(refusing_driver):
    with pytest.raises(CudaUnavailableError, match="has no function cu"):
        load(refusing_driver())


def test_importing_the_native_core_loads_no_driver(tmp_path):
    program = (
        "import sys, kvtier_kernels\n"
        "assert 'kvtier_kernels.cuda' not in sys.modules\n"
        "import kvtier_kernels.cuda\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_error_says_call_arguments_name_and_code():
    error = CudaError("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", "…, 4096")
    assert str(error) == "cuMemAlloc_v2(…, 4096) failed: CUDA_ERROR_OUT_OF_MEMORY (2)"
    assert not error.sticky


def test_an_error_that_loses_the_context_says_so():
    error = CudaError("cuEventQuery", 719, "CUDA_ERROR_LAUNCH_FAILED")
    assert error.sticky
    assert "the context is lost" in str(error)


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(CudaError("cuInit", 999, "CUDA_ERROR_UNKNOWN", "0")))  # noqa: S301
    assert (error.call, error.code, error.name, error.arguments) == ("cuInit", 999, "CUDA_ERROR_UNKNOWN", "0")


def test_what_a_caller_can_handle_is_not_sticky():
    assert STICKY_CODES.isdisjoint({0, 1, 2, 3, 201, 205, 304, 400, 600, 701, 704, 712, 713, 800, 801})


def test_devices_are_named_as_nvidia_smi_names_them():
    assert device_name(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.mark.parametrize("n", [0, 15, 17])
def test_a_uuid_of_another_length_is_refused(n):
    with pytest.raises(ValueError, match=f"uuid has {n} bytes, must have 16"):
        device_name(bytes(n))


def test_threads_that_fail_together_all_hear_why(tmp_path):
    said = []

    def attempt():
        try:
            load(str(tmp_path / "none.so"))
        except CudaUnavailableError as error:
            said.append(str(error))

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(said) == 8
    assert len(set(said)) == 1
