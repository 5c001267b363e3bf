#!/usr/bin/env bash
# Runs the Swift package's `swift build|test|run ...` on Linux, making what is missing: toolchain, ONNX Runtime's header
# and library.
#
#   tools/swift-linux.sh build|test|run ARGUMENT...   `swift` with these, in ios/Lesonnx
#   tools/swift-linux.sh exec COMMAND...              any command, where `swift` would run
#   tools/swift-linux.sh setup                        only make what is missing; says where ONNX Runtime's library is
#   tools/swift-linux.sh is-ready                     whether Swift is here; makes nothing
#
# Where Swift 6 and ONNX Runtime's header (/usr/include/onnxruntime) are installed, they are used. Elsewhere a Debian 13
# is made once in a folder of its own, which takes root, a few minutes and 3 GB, and commands run inside it with this
# checkout mounted at its own path. Nothing else of the machine changes; removing the folder removes all of it.
#
#   LESONNX_SWIFT_ROOT   that folder; /var/lib/lesonnx-swift
#   LESONNX_ORT_VERSION  the ONNX Runtime to run with; the one in .venv, so that Swift and Python run the same library,
#                        or 1.32.0 where there is none. Another version is fetched by pip.
#   LESONNX_ORT_LIBRARY  a libonnxruntime of your own instead
#   LESONNX_MOBILE       test bundles and references; build/mobile
# Every LESONNX_ variable and CI reach the command; folders in LESONNX_MOUNT (separated by colons) are there too.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
store=${LESONNX_SWIFT_ROOT:-/var/lib/lesonnx-swift}
root=$store/trixie
python=${PYTHON:-}
[ -n "$python" ] || { [ -x "$repo/.venv/bin/python" ] && python=$repo/.venv/bin/python || python=python3; }
# Debian's Swift, without what only its debugger and documentation need.
packages="swiftlang libswiftlang swiftlang-dev libc6-dev g++ binutils-gold libonnxruntime-dev git"

say() { echo "swift-linux: $*" >&2; }
fail() { say "$*"; exit 1; }
action=${1:-}
case $action in
    build | test | run | exec | setup | is-ready) shift ;;
    *) fail "expected build, test, run, exec, setup or is-ready, found '$action'" ;;
esac
[ "$action" != exec ] || [ $# -gt 0 ] || fail "exec: expected a command"

is_native() {
    [ -z "${LESONNX_SWIFT_ROOT:-}" ] && [ -f /usr/include/onnxruntime/onnxruntime_c_api.h ] \
        && command -v swift >/dev/null && swift --version 2>/dev/null | grep -qE 'Swift version ([6-9]|[1-9][0-9])'
}

# One process makes the folder; others wait. It is made beside its place, so that what is there is whole.
make_root() {
    [ ! -d "$root" ] || return 0
    [ "$(id -u)" = 0 ] || fail "needs root to make $root (or Swift 6 and libonnxruntime-dev, installed)"
    if ! command -v debootstrap >/dev/null; then
        command -v apt-get >/dev/null || fail "needs debootstrap, or Swift 6 and ONNX Runtime's header, installed"
        apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap >&2
    fi
    say "making a Debian 13 with Swift in $root (once; $store/log tells how)"
    rm -rf "$root.partial"
    {
        debootstrap --variant=minbase --include=ca-certificates trixie "$root.partial" &&
        # What the system's package client goes through (a proxy, say) holds for the new one too.
        { cp -a /etc/apt/apt.conf.d/*proxy* "$root.partial/etc/apt/apt.conf.d/" || true; } &&
        chroot "$root.partial" sh -c "apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages && apt-get clean"
    } >"$store/log" 2>&1 || { tail -n 5 "$store/log" >&2; fail "making $root failed; $store/log has all of it"; }
    [ -f "$root.partial/usr/include/onnxruntime/onnxruntime_c_api.h" ] || fail "libonnxruntime-dev brought no C header"
    mv "$root.partial" "$root"
}

# Sets LESONNX_ORT_LIBRARY: the wheel's library in a folder of its own, the same one that Python loads.
choose_library() {
    [ -z "${LESONNX_ORT_LIBRARY:-}" ] || return 0
    local installed version folder work
    installed=$("$python" -c 'import onnxruntime; print(onnxruntime.__version__)' 2>/dev/null || true)
    version=${LESONNX_ORT_VERSION:-${installed:-1.32.0}}
    folder=$store/onnxruntime/$version
    export LESONNX_ORT_LIBRARY=$folder/libonnxruntime.so.1
    [ ! -e "$LESONNX_ORT_LIBRARY" ] || return 0
    work=$(mktemp -d "$store/ort.XXXXXX")
    trap "rm -rf '$work'" EXIT
    if [ "$version" = "$installed" ]; then
        "$python" -c 'import onnxruntime, pathlib; print(pathlib.Path(onnxruntime.__file__).parent / "capi")' \
            | while read -r capi; do cp "$capi"/libonnxruntime.so.* "$work/"; done
    else
        say "fetching ONNX Runtime $version"
        "$python" -m pip download --quiet --no-deps --only-binary=:all: -d "$work" "onnxruntime==$version" >&2
        "$python" -m zipfile -e "$work"/onnxruntime-*.whl "$work/wheel"
        mv "$work"/wheel/onnxruntime/capi/libonnxruntime.so.* "$work/"
        rm -rf "$work/wheel" "$work"/*.whl
    fi
    ln -s "libonnxruntime.so.$version" "$work/libonnxruntime.so.1"
    [ -e "$work/libonnxruntime.so.1" ] || fail "no libonnxruntime.so.$version in the wheel of onnxruntime $version"
    chmod 755 "$work"
    mkdir -p "$store/onnxruntime"
    mv -T "$work" "$folder"
}

if [ "$action" = is-ready ]; then
    is_native || { [ -d "$root" ] && [ "$(id -u)" = 0 ]; }
    exit
fi
{ mkdir -p "$store" && [ -w "$store" ]; } 2>/dev/null || { store=$repo/build/swift-linux && mkdir -p "$store"; }
exec 9>"$store/lock"
flock 9
is_native || make_root
choose_library
exec 9>&-

if [ "$action" = setup ]; then
    echo "$LESONNX_ORT_LIBRARY"
    exit
fi
[ "$action" = exec ] || set -- swift "$action" "$@"
export LESONNX_MOBILE=${LESONNX_MOBILE:-$repo/build/mobile}
package=$repo/ios/Lesonnx
if is_native; then
    cd "$package"
    exec "$@"
fi

variables=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8)
for name in $(compgen -e LESONNX_) ${CI:+CI}; do variables+=("$name=${!name}"); done
folders=("$repo" "$(dirname "$(realpath "$LESONNX_ORT_LIBRARY")")")
[ ! -d "$LESONNX_MOBILE" ] || folders+=("$(realpath "$LESONNX_MOBILE")")
IFS=: read -ra more <<<"${LESONNX_MOUNT:-}"
# Mounts live in a namespace of this command's own: they end with it, whatever ends it.
exec unshare --mount --propagation private bash -c '
    root=$1 package=$2 count=$3
    shift 3
    mount -t proc proc "$root/proc"
    for folder in "${@:1:count}"; do
        mkdir -p "$root$folder" && mount --bind "$folder" "$root$folder" || exit 1
    done
    shift "$count"
    exec chroot "$root" sh -c "cd \"\$0\" && exec env -i \"\$@\"" "$package" "$@"
' swift-linux "$root" "$package" "$((${#folders[@]} + ${#more[@]}))" "${folders[@]}" "${more[@]}" "${variables[@]}" "$@"
