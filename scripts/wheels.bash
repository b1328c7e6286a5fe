# Extracts files from wheels of the Python index, without installing. Sourced by scripts that need
# vendors' headers, which the repository does not contain. Needs .venv (scripts/setup.sh wheel), or a
# pip in PIP.
read -ra pip <<<"${PIP:-.venv/bin/python -m pip}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# unpack FOLDER PREFIX...: extracts files starting with a PREFIX from the wheels of $work.
unpack() {
  python3 - "$work" "$@" <<'END'
import pathlib, sys, zipfile
for path in pathlib.Path(sys.argv[1]).glob("*.whl"):
    wheel = zipfile.ZipFile(path)
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.startswith(tuple(sys.argv[3:]))])
END
}

download() { "${pip[@]}" --quiet --disable-pip-version-check download --no-deps --only-binary=:all: --dest "$work" "$@"; }
