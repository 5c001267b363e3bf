#!/bin/sh
# Fuzzes the expert kernel under AddressSanitizer and UndefinedBehaviorSanitizer, on every instruction set that is here.
#
#   tools/fuzz-kernel.sh [--seconds N] [--plain]     600 seconds by default; CI uses 10
#
# With clang's libFuzzer where it is installed, otherwise (or with --plain) a driver of random inputs.
set -eu
cd "$(dirname "$0")/.."
seconds=600
plain=no
while [ $# -gt 0 ]; do
    case $1 in
        --seconds) seconds=$2; shift 2 ;;
        --plain) plain=yes; shift ;;
        *) echo "usage: tools/fuzz-kernel.sh [--seconds N] [--plain]" >&2; exit 2 ;;
    esac
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sources=$(ls lesonnx/native/*.c | grep -v operator.c)
flags="-std=c11 -D_DEFAULT_SOURCE -O1 -g -fno-omit-frame-pointer -ffp-contract=off -fno-sanitize-recover=all"
export UBSAN_OPTIONS=print_stacktrace=1

if [ $plain = no ] && command -v clang >/dev/null &&
    echo 'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return d && n ? 0 : 0; }' |
    clang -x c -fsanitize=fuzzer - -o "$work/probe" 2>/dev/null; then
    clang $flags -fsanitize=fuzzer,address,undefined -DLESONNX_LIBFUZZER tools/fuzz_kernel.c $sources -lm -o "$work/fuzz"
    mkdir "$work/corpus"
    # Whole inputs to begin with, so that mutation starts from batches that are computed.
    for i in 1 2 3 4 5 6 7 8; do head -c 512 /dev/urandom >"$work/corpus/$i"; done
    "$work/fuzz" -max_total_time="$seconds" -max_len=1024 -timeout=60 -report_slow_units=60 -rss_limit_mb=2048 -verbosity=0 \
        -print_final_stats=1 -artifact_prefix="${FUZZ_ARTIFACTS:-$PWD}/" "$work/corpus" >"$work/log" 2>&1 ||
        { tail -60 "$work/log" >&2; exit 1; }
    grep "^stat::number_of_executed_units" "$work/log"
    echo "nothing found"
    exit 0
fi
${CC:-cc} $flags -fsanitize=address,undefined tools/fuzz_kernel.c $sources -lm -o "$work/fuzz"
"$work/fuzz" "$seconds" "$(date +%s)"
