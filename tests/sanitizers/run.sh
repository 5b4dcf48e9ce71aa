#!/usr/bin/env bash
# The native core under the compiler's sanitizers: the stress program and the kernel tests with addresses and undefined
# behaviour watched, then the stress program with races watched. (Python itself is not built for the thread sanitizer, so
# that one sees only our own threads.)
#
#   tests/sanitizers/run.sh              both
#   tests/sanitizers/run.sh address      one of them; or: thread
set -euo pipefail
cd "$(dirname "$0")/../.."

python=$PWD/.venv/bin/python
builds=$PWD/build/sanitizers

build() {
    local kind=$1; shift
    "$PWD/.venv/bin/cmake" -S . -B "$builds/$kind" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" \
        -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVTIER_SANITIZER="$kind" -DKVTIER_STRESS=ON \
        -DPython_EXECUTABLE="$python" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" > "$builds/$kind.log" 2>&1 \
        && "$PWD/.venv/bin/cmake" --build "$builds/$kind" --target "$@" >> "$builds/$kind.log" 2>&1 \
        || { tail -n 40 "$builds/$kind.log" >&2; exit 1; }
}

run_address() {
    build address kvtier_stress _native
    echo "[sanitizers] address and undefined behaviour: stress program"
    UBSAN_OPTIONS=print_stacktrace=1 timeout 300 "$builds/address/kvtier_stress"

    # A package of the sources and the watched module. -S keeps the editable installation out, which would win over it.
    local site=$builds/address/site
    rm -rf "$site" && mkdir -p "$site/kvtier_kernels"
    cp -r kernels/kvtier_kernels/*.py kernels/kvtier_kernels/cuda "$site/kvtier_kernels/"
    cp "$builds"/address/_native*.so "$site/kvtier_kernels/"
    local packages; packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "[sanitizers] address and undefined behaviour: kernel tests, and slot records over garbage"
    watched() {
        PYTHONPATH="$site:$packages:$PWD:$PWD/daemon:$PWD/clients" PYTHONDONTWRITEBYTECODE=1 PYTHONMALLOC=malloc \
        ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
        LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so.6)" \
            timeout 900 "$python" -S "$@"
    }
    watched -c "import kvtier_kernels._native as n; assert n.__file__.startswith('$site'), n.__file__"
    # A build for the sanitizers has none of what test_hardening.py looks for in the one that is installed.
    watched -m pytest -q -p no:cacheprovider --timeout 600 --ignore tests/unit/kernels/test_hardening.py \
        tests/unit/kernels tests/unit/memory/test_pool_records.py tests/unit/memory/test_recovery.py
    echo "[sanitizers] address and undefined behaviour: the inputs that the fuzzer has found"
    watched -m pytest -q -p no:cacheprovider --timeout 600 tests/fuzz -k kept
}

run_thread() {
    build thread kvtier_stress
    echo "[sanitizers] races: stress program"
    TSAN_OPTIONS=halt_on_error=1 timeout 300 "$builds/thread/kvtier_stress"
}

mkdir -p "$builds"
case "${1:-all}" in
    address) run_address ;;
    thread)  run_thread ;;
    all)     run_address; run_thread ;;
    *)       echo "unknown argument '$1': use address or thread, or nothing for both" >&2; exit 2 ;;
esac
echo "[sanitizers] nothing found"
