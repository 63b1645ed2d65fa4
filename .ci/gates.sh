# What gates share. `.ci/run` reads this file and then, in a subshell with `set -e`, the file of a gate. It has set: root, the
# checkout; work, a folder of this run that it removes; python, the interpreter; LIMIT, the seconds of one run of pytest.

need_compiler() {
    command -v gcc >/dev/null || die "expected gcc (Debian: build-essential)"
    "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' \
        || die "expected Python.h of $("$python" -V) (Debian: python3-dev)"
}

new_environment() { # name
    "$python" -m venv "$work/$1" || die "expected a working venv module (Debian: python3-venv)"
    activate "$1"
}

activate() { # name
    PATH=$work/$1/bin:$PATH
    hash -r
}

# One environment for the developers' gates, made on first use: build requirements and the extras test, lint, docs.
use_tools() {
    (
        flock 9
        [ -e "$work/tools/ready" ] || make_tools
    ) 9>"$work/tools.lock"
    activate tools
}

make_tools() {
    new_environment tools
    python - >"$work/requirements.txt" <<'PYTHON'
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    data = tomllib.load(file)
extras = data["project"]["optional-dependencies"]
print(*data["build-system"]["requires"], *data["project"]["dependencies"], *extras["test"], *extras["lint"],
      *extras["docs"], sep="\n")
PYTHON
    pip install -q -r "$work/requirements.txt"
    touch "$work/tools/ready"
}

# The checkout as a person gets it, built once by the first gate that wants it: a fresh environment and the README's words.
use_fresh() {
    (
        flock 9
        [ -e "$work/fresh/built" ] || make_fresh
    ) 9>"$work/fresh.lock"
    activate fresh
}

make_fresh() {
    need_compiler
    new_environment fresh
    PIP_LOG=$work/fresh.log pip install -e '.[test]'
    touch "$work/fresh/built"
}

test_has_built() { # whether `test` or `rest` has built the checkout in this run: its environment is `fresh`
    [ -e "$work/fresh/built" ]
}

# The sources in a folder of their own; the rest of the gate happens there.
use_copy() { # name
    cp -r "$work/sources" "$work/$1"
    cd "$work/$1"
}

install_copy() { # in the environment that is active; what it prints is shown if it fails
    pip install -v --no-build-isolation --no-deps -e . >build.log 2>&1 || { cat build.log; return 1; }
}

build_in_copy() {
    install_copy
    export PYTHONPATH=$PWD
    python -c 'import kvcache, os; assert os.path.samefile(os.path.dirname(kvcache.__file__), "kvcache"), kvcache'
}

must_be_silent() { # the log of a build
    if grep -E '(ckernels|kvcache)/.* warning: ' "$1"; then die "the build is not silent"; fi
}

count_as() { # name: the next pytest writes its counts there
    export PYTEST_ADDOPTS="--junitxml=$work/counts/$1.xml -p no:cacheprovider --durations=5 --durations-min=2"
}

limited() { # command, which stays in the process group of its lane
    timeout --foreground -k 10 "$LIMIT" "$@"
}
