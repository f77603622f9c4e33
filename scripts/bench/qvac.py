"""QVAC Fabric's prebuilt library in prge's cache, and GGUF files of the types that it trains on.

The library is in npm's package @qvac/fabric, which has the C API that the addons of QVAC are built on. npm
downloads the package (198 MB) from its configured registry; only the library and its backends for processors
are kept, so that no GPU is used.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from textwrap import shorten

from processes import LackingError, run_command

from prge.system.user_cache import user_cache

PACKAGE, VERSION = "@qvac/fabric", "0.15.0"
# As in a package-lock.json.
INTEGRITY = "sha512-07ppIuba4iUzgDgHxyDKZLF30qZ21miiITsMDN8aFPIPsOxSNfQY0WGE4YkiOHH8rqjytzV4le8ei+UjN3st0A=="
LIBRARY = "qvac__fabric.bare"
_EMBEDDING = "token_embd.weight"
_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}


def library_path() -> Path:
    """Return the path of the library, which is downloaded first if it is absent.

    Raises:
        LackingError: there is no npm, the package can't be downloaded or is another one, or it has no library
            for this machine.
    """
    folder = user_cache("qvac") / VERSION
    if not (folder / LIBRARY).is_file():
        npm = shutil.which("npm")
        if npm is None:
            raise LackingError("there is no npm to download qvac with; Debian: apt install npm")
        print(f"downloading {PACKAGE} {VERSION}, 198 MB", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            temporary = Path(name)
            command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--loglevel", "error"]
            try:
                run_command([*command, "--pack-destination", temporary])
            except LackingError as error:
                reason = shorten(str(error), 300)
                raise LackingError(f"{PACKAGE} {VERSION} can't be downloaded: {reason}") from None
            (tarball,) = temporary.glob("*.tgz")
            if (integrity := integrity_of(tarball)) != INTEGRITY:
                raise LackingError(f"{PACKAGE} {VERSION} has another content than expected: {integrity}")
            extract(tarball, f"{sys.platform}-{_ARCHITECTURES.get(platform.machine())}", temporary / VERSION)
            (temporary / VERSION).rename(folder)
    return folder / LIBRARY


def integrity_of(path: Path) -> str:
    """Return the hash of a file as npm writes it."""
    return f"sha512-{base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()}"


def extract(tarball: Path, target: str, folder: Path) -> None:
    """Extract the library for a target, such as linux-x64, and its backends for processors.

    Raises:
        LackingError: there is no such library.
    """
    root = PurePosixPath("package", "prebuilds", target)
    with tarfile.open(tarball) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if path == root / LIBRARY or (path.parent == root / Path(LIBRARY).stem and "-cpu-" in path.name):
                content = archive.extractfile(member)
                assert content is not None
                out = folder / path.relative_to(root)
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("wb") as stream:
                    shutil.copyfileobj(content, stream)
    if not (folder / LIBRARY).is_file():
        raise LackingError(f"{tarball.name} has no library for {target}")


def convert(source: Path, target: Path, weight_type: str) -> None:
    """Write a GGUF file with all matrices in one type: f32, q8_0 or q4_0.

    The embedding of q4_0 is q8_0, as in llama.cpp's files.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    matrices = GGMLQuantizationType[weight_type.upper()]
    embedding = GGMLQuantizationType.Q8_0 if weight_type == "q4_0" else matrices
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        # The writer adds the others.
        if not name.startswith("GGUF.") and name != "general.architecture":
            item_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=item_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        types = {
            _EMBEDDING: embedding,
            **({} if values.ndim > 1 else {tensor.name: GGMLQuantizationType.F32}),
        }
        new_type = types.get(tensor.name, matrices)
        writer.add_tensor(tensor.name, quantize(values, new_type), raw_dtype=new_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
