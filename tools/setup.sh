# Sourced by quickstart and check: installs packages, configures and builds. POSIX shell; works on a bare Debian or Ubuntu.
# A script that sets `log` to a file has packages and builds in there, and one line on each here.

export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive

# The command finds its profiles through /proc, which a bare chroot may lack.
[ -e /proc/self/exe ] || export MOE_PLAN_PROFILES="$PWD/profiles"

log=${log:-}

say() { printf '\n==> %s\n' "$*"; }

# Prints a command as it could be typed, then runs it.
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

now() { date +%s; }

# duration SECONDS: "3 min 20 s", "20 s".
duration() {
    if [ "$1" -ge 60 ]; then
        printf '%d min %d s' $(($1 / 60)) $(($1 % 60))
    else
        printf '%d s' "$1"
    fi
}

# Repeats the log's last line on the terminal's last line until it is stopped or the script is gone.
follow() {
    columns=$(stty size 2>/dev/null </dev/tty | cut -d ' ' -f 2)
    while kill -0 $$ 2>/dev/null; do
        printf '\r\033[K%s' "$(tail -n 1 "$log" | cut -c "1-$((${columns:-80} - 1))")" >&2
        sleep 1
    done
}

# quietly WORDS COMMAND...: runs the command with its output in the log. One line says what it was and how long it took,
# or what went wrong; a terminal shows meanwhile what it does. Without a log the command prints as ever.
quietly() {
    words=$1
    shift
    if [ -z "$log" ]; then
        run "$@"
        return
    fi
    printf '\n$ %s\n' "$*" >>"$log"
    started=$(now) follower="" outcome=0
    if [ -t 2 ]; then
        follow &
        follower=$!
        # Until the next trap, the screen is left in order however the script ends.
        trap 'kill "$follower" 2>/dev/null' EXIT
    fi
    "$@" >>"$log" 2>&1 || outcome=$?
    if [ -n "$follower" ]; then
        kill "$follower" 2>/dev/null || true
        wait "$follower" 2>/dev/null || true
        trap - EXIT
        printf '\r\033[K' >&2
    fi
    if [ "$outcome" -ne 0 ]; then
        printf '%s failed; the end of %s:\n' "$words" "$log" >&2
        tail -n 20 "$log" >&2
        exit "$outcome"
    fi
    printf '%s: %s\n' "$words" "$(duration $(($(now) - started)))"
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
        echo "All packages are installed already"
        return 0
    fi
    sudo=
    if [ "$(id -u)" -ne 0 ]; then
        sudo=sudo
        if ! command -v sudo >/dev/null; then
            echo "missing packages:$missing; run as root, or install sudo" >&2
            exit 1
        fi
        sudo -v # asks for the password before anything else is on the screen
    fi
    echo "Missing packages:$missing"
    quietly "Lists of packages" $sudo apt-get update -q
    # The list splits into words on purpose.
    # shellcheck disable=SC2086
    quietly "Packages installed" $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
}

# build FOLDER MESON_OPTION...: configures once, builds always.
build() {
    folder=$1
    shift
    if [ ! -f "$folder/build.ninja" ]; then
        quietly "Configured $folder" meson setup "$folder" "$@"
    fi
    quietly "Built $folder" ninja -C "$folder"
}

# shellcheck disable=SC2034 # for the scripts that source this
build_packages="g++ meson ninja-build pkg-config libeigen3-dev libboost-dev libfmt-dev nlohmann-json3-dev libcli11-dev libyaml-cpp-dev libtomlplusplus-dev libicu-dev libsqlite3-dev zlib1g-dev libjemalloc-dev"
# shellcheck disable=SC2034
test_packages="doctest-dev openmpi-bin python3-dev python3-venv python3-jsonschema python3-yaml clang-format clang-tidy"
# Ubuntu's package of this name is a snap, which a chroot or a container cannot run.
# shellcheck disable=SC2034
[ "$(sed -n 's/^ID=//p' /etc/os-release 2>/dev/null)" != debian ] || test_packages="$test_packages chromium"
