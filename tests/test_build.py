# SPDX-License-Identifier: MIT
"""The build: what is compiled, for which architectures, against which torch; and what import needs.

Nothing is compiled here: a ROCm torch is simulated with compilers that only record their arguments.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
import torch

from rotquant_hip import _loader

ROOT = Path(__file__).resolve().parents[1]
BACKEND = ROOT / "build_backend"
sys.path.insert(0, str(BACKEND))
import build_config  # noqa: E402


def run_python(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
    options.setdefault("check", True)
    command = [options.pop("python", sys.executable), "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, **options)
    return result


def fingerprint(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file outside build/."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] != "build"
    }


def found(folder: Path, *patterns: str) -> list[str]:
    """Files that match, relative to `folder`."""
    paths = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is needed to build."""
    copy = tmp_path / "tree"
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json")
    for name in ("build_backend", "csrc", "rotquant_hip"):
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


# --- B47: which architectures ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["gfx950"]),
        ("gfx950", ["gfx950"]),
        ("gfx950:sramecc+:xnack-", ["gfx950:sramecc+:xnack-"]),
        ("gfx90a;gfx942;gfx950", ["gfx950"]),  # as ROCm images export it
        (" gfx942 gfx950;gfx950 ", ["gfx950"]),
    ],
)
def test_b47_arch_list(value: str | None, expected: list[str], capsys) -> None:
    environ = {} if value is None else {"PYTORCH_ROCM_ARCH": value}
    assert build_config.offload_archs(environ) == expected
    printed = capsys.readouterr().out
    assert all(arch in printed for arch in expected)
    assert "PYTORCH_ROCM_ARCH" in printed


@pytest.mark.parametrize("value", ["", " ", ";", "gfx942", "native"])
def test_b47_arch_list_without_a_known_arch_is_refused(value: str) -> None:
    with pytest.raises(build_config.BuildRefused) as refusal:
        build_config.offload_archs({"PYTORCH_ROCM_ARCH": value})
    sentence = str(refusal.value)
    assert repr(value) in sentence and "gfx950" in sentence and "\n" not in sentence


def test_b47_cpu_torch_builds_cpu_ops(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert build_config.device_archs(torch, {"PYTORCH_ROCM_ARCH": ""}) == []
    arguments = build_config.extension_arguments(ROOT, torch, [])
    assert "csrc/register.cpp" in arguments["sources"]
    assert not [s for s in arguments["sources"] if s.endswith(".hip")]
    assert "ROTQUANT_WITH_HIP" not in dict(arguments["define_macros"])


# --- B48, B56: a build for ROCm rewrites nothing and asks no device -------------------------------

# Compiler, linker and hipcc at once: records its arguments and makes an empty output.
RECORDER = """#!{python}
import json, os, sys
if any("dump" in a and "version" in a for a in sys.argv):
    print("12.2.0")
    sys.exit()
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps(sys.argv) + "\\n")
for flag in ("-o", "-MF"):
    if flag in sys.argv:
        path = sys.argv[sys.argv.index(flag) + 1]
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        open(path, "w").close()
"""

# setup.py under a torch that says it was built for HIP and whose devices must not be asked for.
SIMULATE_ROCM = """
import runpy, sys, torch
torch.version.hip = "7.2.0"
torch.cuda._is_compiled = lambda: True
def touched(*args, **kwargs):
    raise AssertionError("the build asked for a device")
for name in ("is_available", "device_count", "current_device", "get_device_properties",
             "get_device_capability", "_lazy_init", "init"):
    setattr(torch.cuda, name, touched)
sys.argv = ["setup.py", "build_ext"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.fixture
def rocm_build(tree: Path, tmp_path: Path):
    """Run a build for a simulated ROCm torch; returns (tree, output, calls of each compiler)."""
    rocm = tmp_path / "rocm"
    (rocm / "bin").mkdir(parents=True)
    for name in ("hipcc", "c++"):
        script = rocm / "bin" / name
        script.write_text(RECORDER.format(python=sys.executable))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    record = tmp_path / "record"
    environ = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
        "HOME": str(tmp_path),
        "ROCM_HOME": str(rocm),
        "CXX": str(rocm / "bin" / "c++"),
        "CC": str(rocm / "bin" / "c++"),
        "RECORD": str(record),
        "MAX_JOBS": "2",
        "HIP_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def build(**variables: str):
        result = run_python(SIMULATE_ROCM, cwd=tree, env={**environ, **variables}, check=False)
        calls: dict[str, list[list[str]]] = {"hipcc": [], "c++": []}
        for line in record.read_text().splitlines() if record.exists() else []:
            compiler, *arguments = json.loads(line)
            calls[Path(compiler).name].append(arguments)
        return result, calls

    return build


def compiled(calls: list[list[str]], tree: Path) -> list[str]:
    return sorted(
        Path(call[len(call) - 1 - call[::-1].index("-c") + 1]).relative_to(tree).as_posix()
        for call in calls
        if "-c" in call
    )


def test_b48_b56_rocm_build_sources_and_flags(rocm_build, tree: Path) -> None:
    before = fingerprint(tree)
    result, calls = rocm_build()
    assert result.returncode == 0, result.stdout + result.stderr
    assert fingerprint(tree) == before, "a build must not write into the source tree"
    assert "PYTORCH_ROCM_ARCH is unset, building for gfx950" in result.stdout

    hip = found(tree, "csrc/hip/**/*.hip")
    cxx = found(tree, "csrc/register.cpp", "csrc/ops/**/*.cpp", "csrc/cpu/**/*.cpp")
    assert hip and compiled(calls["hipcc"], tree) == hip
    assert compiled(calls["c++"], tree) == cxx

    for call in calls["hipcc"]:
        assert [a for a in call if a.startswith("--offload-arch")] == ["--offload-arch=gfx950"]
        assert [a for a in call if a.startswith("-std=")] == ["-std=c++20"]
        assert {"-fno-gpu-rdc", "-ffp-contract=off", "-fvisibility=hidden", "-O3"} <= set(call)
        assert "-fopenmp" not in call
    for call in (c for c in calls["hipcc"] + calls["c++"] if "-c" in c):
        assert "-DROTQUANT_WITH_HIP" in call
        assert '-DROTQUANT_HIP_ARCHS="gfx950"' in call
        assert "-ffp-contract=off" in call
    (link,) = [c for c in calls["c++"] if "-shared" in c]
    assert {"-lamdhip64", "-lc10_hip", "-ltorch_hip"} <= set(link)

    (info,) = (tree / "build").rglob(build_config.BUILD_INFO)
    assert json.loads(info.read_text()) == {
        "torch": torch.__version__,
        "hip": "7.2.0",
        "archs": ["gfx950"],
    }


def edit(path: Path) -> None:
    """Make a file newer than everything, whatever the clock's resolution."""
    later = time.time() + 100
    os.utime(path, (later, later))


@pytest.mark.parametrize("edited", ["csrc/core/gemm_configs.def", "csrc/hip/device/fwht.h"])
def test_an_edited_table_or_header_rebuilds_the_device_objects(
    rocm_build, tree: Path, edited: str
) -> None:
    hip = found(tree, "csrc/hip/**/*.hip")
    for _ in range(2):  # the second time nothing was edited
        result, calls = rocm_build()
        assert result.returncode == 0, result.stdout + result.stderr
        assert compiled(calls["hipcc"], tree) == hip
    edit(tree / edited)
    result, calls = rocm_build()
    assert result.returncode == 0, result.stdout + result.stderr
    assert compiled(calls["hipcc"], tree) == sorted([*hip, *hip])


@pytest.mark.parametrize("edited", ["csrc/core/gemm_configs.def", "csrc/hip/device/fwht.h"])
def test_an_edited_table_or_header_rebuilds_the_code_objects(tmp_path: Path, edited: str) -> None:
    """The CMake target gfx950, with a compiler that only makes its output."""
    tree = tmp_path / "tree"
    for name in ("csrc", "cmake"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    tool = tmp_path / "tool"
    tool.write_text(RECORDER.format(python=sys.executable))
    tool.chmod(0o755)
    record = tmp_path / "record"
    environ = {**os.environ, "RECORD": str(record)}
    cmake = [sys.executable, "-m", "cmake"]
    tools = [f"-DROTQUANT_{name}={tool}" for name in ("CLANG", "LLD")]
    subprocess.run(
        [*cmake, "-S", tree, "-B", tree / "build", "-G", "Ninja", *tools],
        check=True,
        env=environ,
        capture_output=True,
    )

    def build() -> int:
        subprocess.run(
            [*cmake, "--build", tree / "build", "--target", "gfx950"],
            check=True,
            env=environ,
            capture_output=True,
        )
        return len(record.read_text().splitlines())

    once = build()
    assert once >= 3 * len(found(tree, "csrc/hip/*/kernel.hip", "csrc/hip/*/inst/*.hip"))
    assert build() == once, "nothing was edited"
    edit(tree / edited)
    assert build() == 2 * once


def test_b47_rocm_build_with_an_empty_list_is_refused(rocm_build) -> None:
    result, calls = rocm_build(PYTORCH_ROCM_ARCH="")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("rotquant_hip: PYTORCH_ROCM_ARCH=''")
    assert "Traceback" not in result.stderr
    assert not calls["hipcc"] and not calls["c++"]


def test_rocm_torch_without_hipcc_is_refused(rocm_build, tmp_path: Path) -> None:
    (tmp_path / "rocm/bin/hipcc").unlink()
    result, _ = rocm_build()
    assert result.returncode == 1
    assert "hipcc" in result.stderr and "ROCM_HOME" in result.stderr
    assert "Traceback" not in result.stderr


def test_b48_hipify_finds_nothing_to_rewrite(tree: Path) -> None:
    """Whoever runs hipify over our sources (torch's JIT loader does) gets them back unchanged."""
    from torch.utils.hipify import hipify_python

    before = fingerprint(tree)
    files = [str(p) for p in (tree / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".hip")]
    result = hipify_python.hipify(
        project_directory=str(tree),
        output_directory=str(tree),
        includes=[f"{tree}/*"],
        header_include_dirs=[str(tree / "csrc")],
        extra_files=files,
        is_pytorch_extension=True,
        hipify_extra_files_only=True,
    )
    rewritten = {
        Path(name).relative_to(tree).as_posix(): entry.status
        for name, entry in result.items()
        if entry.hipified_path not in (None, name)
    }
    assert set(files) <= set(result)
    assert not rewritten
    assert fingerprint(tree) == before


# --- the PEP 517 backend --------------------------------------------------------------------------


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter with no packages at all."""
    folder = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


HOOK = "import sys; sys.path.insert(0, sys.argv[1]); import rotquant_build as backend; "


@pytest.mark.parametrize(
    "hook",
    [
        "get_requires_for_build_wheel()",
        "get_requires_for_build_editable()",
        "prepare_metadata_for_build_wheel('.')",
        "build_wheel('.')",
        "build_editable('.')",
    ],
)
def test_backend_refuses_without_torch_in_one_sentence(bare_python: Path, hook: str) -> None:
    result = run_python(f"{HOOK}backend.{hook}", BACKEND, python=bare_python, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("rotquant_hip: no torch in this environment")


def test_backend_sees_the_torch_that_isolation_hides() -> None:
    # pip isolates by taking the environment's folders off sys.path and setting these two variables.
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if not p.endswith('-packages')]; "
        f"{HOOK}missing = backend.get_requires_for_build_wheel(); "
        "import torch.version; print(torch.version.__version__, *missing)"
    )
    isolated = {**os.environ, "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    answer = run_python(code, BACKEND, env=isolated).stdout.split()
    assert answer[0] == torch.__version__
    assert not any("torch" in name for name in answer[1:])


def test_sdist_needs_no_torch(bare_python: Path, tree: Path, tmp_path: Path) -> None:
    # setuptools alone: its folder also holds torch.
    packages = tmp_path / "packages"
    packages.mkdir()
    site = Path(sysconfig.get_path("purelib"))
    needed = [site / "_distutils_hack", site / "setuptools", *site.glob("setuptools-*.dist-info")]
    for path in needed:
        (packages / path.name).symlink_to(path)
    run_python(
        f"{HOOK}backend.build_sdist(sys.argv[2])",
        tree / "build_backend",
        tmp_path,
        python=bare_python,
        cwd=tree,
        env={"PYTHONPATH": str(packages)},
    )
    (archive,) = tmp_path.glob("rotquant_hip-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {*found(tree, "csrc/**/*", "build_backend/*.py"), "setup.py", "pyproject.toml"}
    assert wanted <= names
    assert {"LICENSE", "rotquant_hip/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", "_build_info.json", ".pyc"))]


def checkout(folder: Path) -> list[str]:
    """Copies the files of this checkout that git would commit; returns their names."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return names


def test_sdist_has_every_file_and_nothing_that_a_build_made(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    names = checkout(tree)
    made = (
        "emulator/build/lib/gfx950_emulator/hip/runtime.cpp",
        "emulator/build/temp/csrc/mfma.o",
        "emulator/src/gfx950_emulator.egg-info/PKG-INFO",
        "emulator/src/gfx950_emulator/_core_v3.so",
        "emulator/.ruff_cache/CACHEDIR.TAG",
        "tests/.hypothesis/examples/1",
        "emulator/.pytest_cache/README.md",
        "tests/__pycache__/test_build.cpython-311.pyc",
        "rotquant_hip/_build_info.json",
    )
    for name in made:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("made by a build")
    run_python(
        f"{HOOK}backend.build_sdist(sys.argv[2])", tree / "build_backend", tmp_path, cwd=tree
    )
    (archive,) = tmp_path.glob("rotquant_hip-*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {m.name.partition("/")[2] for m in tar.getmembers() if m.isfile()}
    packed = {name for name in packed if not name.startswith("rotquant_hip.egg-info/")}
    assert packed - {"PKG-INFO", "setup.cfg"} == set(names)


# --- what is built --------------------------------------------------------------------------------


def libraries(package: str) -> list[Path]:
    """The compiled modules of an installed package; its other files are not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    return sorted(Path(spec.origin).parent.glob("*.so"))


@pytest.mark.parametrize("package", ["rotquant_hip", "gfx950_emulator"])
def test_a_library_does_not_name_the_folders_of_its_build(package: str) -> None:
    built = libraries(package)
    assert built
    folders = (ROOT, Path(torch.__file__).parent, Path.home(), Path(tempfile.gettempdir()))
    for library in built:
        strings = re.findall(rb"[\x20-\x7e]{6,}", library.read_bytes())
        for folder in folders:
            found = [s.decode() for s in strings if f"{folder}/".encode() in s]
            assert not found, f"{library.name}: {found[:5]}"


# --- what import needs ----------------------------------------------------------------------------


def test_b50_import_needs_no_gpu_and_no_rocminfo() -> None:
    code = (
        "import rotquant_hip, torch; assert not torch.cuda.is_initialized(); "
        "print(torch.ops.rotquant_hip.quant(torch.ones(1, 32))[1].item())"
    )
    environ = {"PATH": "/nonexistent", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    # amax 1: the smallest power of two >= 1/6 is 2^-2, byte 125.
    assert run_python(code, env=environ).stdout.strip() == "125"


@pytest.mark.parametrize("record", [{"torch": "2.9.1+rocm7.1", "hip": "7.1.5"}, {"torch": "1.0"}])
def test_wheel_for_another_torch_fails_at_import(record: dict, tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "_build_info.json"
    info.write_text(json.dumps({"hip": None, "archs": [], **record}))
    monkeypatch.setattr(_loader, "BUILD_INFO", info)
    monkeypatch.setattr(_loader.importlib, "import_module", lambda name: pytest.fail("loaded"))
    with pytest.raises(ImportError) as error:
        _loader.load_extension()
    message = str(error.value)
    assert record["torch"] in message and torch.__version__ in message
    assert "pip install" in message


def test_extension_not_built_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(_loader, "BUILD_INFO", tmp_path / "_build_info.json")
    with pytest.raises(ImportError, match="has not been built.*pip install"):
        _loader.load_extension()


@pytest.mark.parametrize(
    "content",
    [b"", b'{"torch": "2.1', b"\xff\xfe{}", b"[]", b"null", b"{}", b'{"torch": 2}', b"[" * 100_000],
    ids=["empty", "truncated", "encoding", "list", "null", "no keys", "number", "deep"],
)
def test_unreadable_record_is_said(content: bytes, tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "_build_info.json"
    info.write_bytes(content)
    monkeypatch.setattr(_loader, "BUILD_INFO", info)
    with pytest.raises(ImportError) as error:
        _loader.load_extension()
    message = str(error.value)
    assert message.startswith(str(info)) and "pip install" in message and "\n" not in message


def test_second_build_in_one_process_is_said(tmp_path: Path) -> None:
    package = Path(_loader.__file__).parent
    shutil.copytree(
        package, tmp_path / "rotquant_hip", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = """
import sys
import rotquant_hip
for name in [n for n in sys.modules if n.partition(".")[0] == "rotquant_hip"]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
try:
    import rotquant_hip
except ImportError as error:
    print(error)
"""
    said = run_python(code, tmp_path).stdout
    (sentence,) = said.splitlines()
    assert "one build for each process" in sentence and str(tmp_path) in sentence


def test_build_record_is_that_of_this_torch() -> None:
    record = _loader.build_info()
    assert record["torch"] == torch.__version__ and record["hip"] == torch.version.hip
    assert bool(record["archs"]) == (torch.version.hip is not None)


@pytest.mark.parametrize("compiled_for", ["gfx950", "gfx942;gfx950", "gfx950:xnack-"])
def test_b51_a_compiled_arch_is_accepted(compiled_for: str) -> None:
    torch.ops.rotquant_hip._check_arch(compiled_for, "gfx950:sramecc+:xnack-")


@pytest.mark.parametrize("compiled_for", ["gfx942", "gfx9500", "gfx942;gfx90a"])
def test_b51_another_arch_raises_before_the_first_launch(compiled_for: str) -> None:
    with pytest.raises(RuntimeError) as error:
        torch.ops.rotquant_hip._check_arch(compiled_for, "gfx950:sramecc+:xnack-")
    assert compiled_for in str(error.value) and "gfx950" in str(error.value)


# --- one truth ------------------------------------------------------------------------------------


def test_lint_versions_agree() -> None:
    pinned = set(re.findall(r"[\w-]+==[\w.]+", (ROOT / "requirements/lint.txt").read_text()))
    hooks = set(re.findall(r"[\w-]+==[\w.]+", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert pinned == hooks
