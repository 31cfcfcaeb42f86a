# Sourced by quickstart and check: installs packages, configures and builds. POSIX shell; works on a bare Debian or Ubuntu.

export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive

# The command finds its profiles through /proc, which a bare chroot may lack.
[ -e /proc/self/exe ] || export MOE_PLAN_PROFILES="$PWD/profiles"

say() { printf '\n==> %s\n' "$*"; }

# Prints a command as it could be typed, then runs it.
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

# install_packages NAME...: what is missing, with apt, as root or through sudo.
install_packages() {
    if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
        say "No apt-get here: the build needs what Debian calls $*"
        return 0
    fi
    missing=
    for package in "$@"; do
        installed "$package" || missing="$missing $package"
    done
    if [ -z "$missing" ]; then
        say "All packages are installed already: $*"
        return 0
    fi
    sudo=
    if [ "$(id -u)" -ne 0 ]; then
        sudo=sudo
        if ! command -v sudo >/dev/null; then
            echo "missing packages:$missing; run as root, or install sudo" >&2
            exit 1
        fi
    fi
    say "Installing with apt:$missing"
    # The list splits into words on purpose.
    # shellcheck disable=SC2086
    $sudo apt-get update -q && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
}

# build FOLDER MESON_OPTION...: configures once, builds always.
build() {
    folder=$1
    shift
    if [ ! -f "$folder/build.ninja" ]; then
        run meson setup "$folder" "$@"
    fi
    run ninja -C "$folder"
}

build_packages="g++ meson ninja-build pkg-config libeigen3-dev libboost-dev libfmt-dev nlohmann-json3-dev libcli11-dev libicu-dev"
test_packages="doctest-dev openmpi-bin python3-jsonschema clang-format clang-tidy"
