# Sourced by tools/check: the tests of tests/megatron with a megatron-core of their own.

# megatron_test NAME COMMAND...: one line in the closing table; a test may skip itself by exit status 77.
megatron_test() {
    name=$1
    shift
    started=$(date +%s) status=0
    run "$@" || status=$?
    case "$status" in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
    part "$name" "$started"
}

check_megatron() {
    build build-fast -Dbuildtype=release -Dcuda=disabled
    venv=build-fast/megatron
    [ -x "$venv/bin/python" ] || run python3 -m venv "$venv"
    run "$venv/bin/python" -m pip install --quiet torch numpy packaging pyyaml psutil typing_extensions
    run "$venv/bin/python" -m pip install --quiet --no-deps --ignore-requires-python \
        "megatron-core==${MEGATRON_CORE:-0.19.2}"
    megatron_test "megatron launch" "$venv/bin/python" tests/megatron/launched.py build-fast/tools/moe-plan
    megatron_test "megatron lists of arguments" "$venv/bin/python" tests/megatron/dumped.py build-fast/tools/moe-plan
    megatron_test "megatron refusals" "$venv/bin/python" tests/megatron/refused.py build-fast/tools/moe-plan
    megatron_test "megatron rules" "$venv/bin/python" tests/megatron/agree.py --count 1000
    megatron_test "megatron verdicts" "$venv/bin/python" tests/megatron/agree.py --held
    megatron_test "megatron rules by arguments" "$venv/bin/python" tests/megatron/agree.py --count 300 --arguments
    made=$(mktemp -d)
    megatron_test "megatron checkpoints" "$venv/bin/python" tests/engine/train/megatron/make.py "$made" \
        --test build-fast/tests/engine_test
    rm -rf "$made"
}
