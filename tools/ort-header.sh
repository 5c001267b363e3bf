#!/usr/bin/env bash
# Fetch ONNX Runtime's real C header into DIRECTORY, for tests/test_ort_header.py (LESONNX_ORT_INCLUDE=DIRECTORY).
# Debian has it in libonnxruntime-dev from release 13 on; on an older Debian the newer release's package is unpacked,
# not installed: the system's own package sources are read with another suite, in a place of their own.
set -euo pipefail
target=${1:?usage: tools/ort-header.sh DIRECTORY}
suite=trixie
mkdir -p "$target"
target=$(cd "$target" && pwd)
if [ -f /usr/include/onnxruntime/onnxruntime_c_api.h ]; then
    cp /usr/include/onnxruntime/*.h "$target"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/sources"
. /etc/os-release
for list in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    [ -f "$list" ] || continue
    # A stanza (or line) of the main archive alone: updates and security have suites of their own.
    case $list in
        *.sources) awk 'BEGIN { RS = ""; ORS = "\n\n" } !/-security/' "$list" | sed "s/^Suites:.*/Suites: $suite/" ;;
        *) grep -v -e -security -e -updates "$list" | sed "s/ $VERSION_CODENAME / $suite /" || true ;;
    esac > "$work/sources/$(basename "$list")"
done
options=(-o "Dir::Etc::SourceList=/dev/null" -o "Dir::Etc::SourceParts=$work/sources" -o "Dir::State::Lists=$work/lists"
    -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=root")
apt-get "${options[@]}" -qq update
(cd "$work" && apt-get "${options[@]}" -qq download libonnxruntime-dev)
dpkg-deb -x "$work"/libonnxruntime-dev_*.deb "$work/unpacked"
find "$work/unpacked" -name 'onnxruntime*_c_api.h' -o -name 'onnxruntime_ep_c_api.h' | while read -r header; do
    cp "$(dirname "$header")"/*.h "$target"
done
test -f "$target/onnxruntime_c_api.h"
