#!/bin/sh
# Tests the ARM files of the kernel on another processor, under qemu: the same vectors as here on every instruction set,
# run-time dispatch on three cores, and the operator inside ONNX Runtime's own aarch64 library.
#
#   tools/test-arm.sh [--no-ort]
#
# On Debian it installs what is missing (cross compiler, qemu-user). Needs the kernel built here (pip install -e .) and,
# unless --no-ort, pip to fetch the aarch64 wheel of the installed onnxruntime version. CC_ARM overrides the compiler.
set -eu
cd "$(dirname "$0")/.."
with_ort=yes
[ "${1:-}" = "--no-ort" ] && with_ort=no
cc_arm=${CC_ARM:-aarch64-linux-gnu-gcc}
python=${PYTHON:-python3}
sysroot=${ARM_SYSROOT:-/usr/aarch64-linux-gnu}

if ! command -v "${cc_arm%% *}" >/dev/null || ! command -v qemu-aarch64 >/dev/null; then
    command -v apt-get >/dev/null || { echo "test-arm: needs aarch64-linux-gnu-gcc and qemu-aarch64" >&2; exit 1; }
    sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq --no-install-recommends \
        gcc-aarch64-linux-gnu libc6-dev-arm64-cross libstdc++6-arm64-cross qemu-user
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-std=c11 -D_DEFAULT_SOURCE -O3 -ffp-contract=off -fPIC -fvisibility=hidden"
sources=$(ls lesonnx/native/*.c | grep -v operator.c)

echo "== the same vectors on every instruction set"
${CC:-cc} $flags tools/kernel_vectors.c $sources -lm -o "$work/here"
$cc_arm $flags -static tools/kernel_vectors.c $sources -lm -o "$work/arm"
"$work/here" portable >"$work/expected"
for isa in portable neon dotprod i8mm; do
    qemu-aarch64 -cpu max "$work/arm" $isa >"$work/actual"
    cmp "$work/expected" "$work/actual"
    echo "$isa: $(wc -l <"$work/actual") results equal"
done

echo "== what dispatch chooses"
for pair in max=i8mm cortex-a76=dotprod cortex-a53=neon; do
    chosen=$(qemu-aarch64 -cpu "${pair%=*}" "$work/arm")
    echo "${pair%=*}: $chosen"
    [ "${chosen%% *}" = "${pair#*=}" ]
done
[ $with_ort = yes ] || exit 0

echo "== the operator in ONNX Runtime's aarch64 library"
version=$($python -c 'import onnxruntime; print(onnxruntime.__version__)')
abi=$($python -c 'import sys; print("%d%d" % sys.version_info[:2])')
$python -m pip download -q --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 \
    --python-version "$abi" -d "$work" "onnxruntime==$version"
$python -c "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])" "$work"/onnxruntime-*.whl "$work/wheel"
$cc_arm $flags -shared lesonnx/native/*.c -lm -o "$work/liblesonnx.so"
$cc_arm $flags tools/ort_host.c -ldl -o "$work/host"
# ONNX Runtime reads /proc/cpuinfo at start, and qemu shows the real machine's: a prefix with one of an ARM core.
mkdir -p "$work/prefix/proc" "$work/prefix/sys"
cp -r "$sysroot/lib" "$work/prefix/lib"
for core in 0 1; do
    printf 'processor\t: %s\nBogoMIPS\t: 100.00\nFeatures\t: fp asimd asimddp i8mm\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0xd0b\nCPU revision\t: 0\n\n' $core
done >"$work/prefix/proc/cpuinfo"
$python tools/ort_cases.py write "$work"
runtime=$(ls "$work"/wheel/onnxruntime/capi/libonnxruntime.so.*)
for core in max cortex-a76 cortex-a53; do
    for index in 0 1 2 3; do
        for threads in 1 3; do
            qemu-aarch64 -cpu $core -L "$work/prefix" "$work/host" "$runtime" "$work/liblesonnx.so" \
                "$work/case_$index.bin" "$work/output_${core}_${threads}_$index.bin" $threads 2>"$work/errors" ||
                { cat "$work/errors" >&2; exit 1; }
        done
    done
done
$python tools/ort_cases.py compare "$work"
