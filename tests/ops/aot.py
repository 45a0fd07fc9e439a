"""Ahead-of-time compilation of Triton kernels for GPUs that are not here, and what the compiler says about them.

    compile_kernel(kernel, signature, constants, "sm_90") -> CompiledReport

Triton's wheel carries ptxas and an AMD code generator, so no driver is needed. Reports are cached in the user's cache
folder by the source of the kernel and of everything that it calls. A process in which TRITON_INTERPRET is set cannot
compile. Nothing of nestpipe imports Triton without a device, so kernels are imported by the tests that compile them.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nestpipe.atomic_files import replace_file
from nestpipe.ops.native_library import cache_folders

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
MAX_SHARED_BYTES = 99 << 10  # of one block on the smallest device: sm_86


@dataclass(frozen=True, slots=True)
class CompiledReport:
    """What a kernel takes on a target."""

    spill_bytes: int  # the stack of a thread: registers that did not fit, and arrays
    registers: int  # of a thread
    shared_bytes: int  # of a block of threads
    assembly: str  # PTX, or that of AMD

    def inexact_operations(self) -> list[str]:
        """Operations in PTX that round differently from those of C++: fused, approximate, or without denormals.

        AMD builds exact division and roots from fused steps, so there the source decides: `div_rn` and `sqrt_rn`.
        """
        pattern = r"\b(?:(?:fma|mad)\.[\w.]*f(?:32|64)|div\.full[\w.]*|\w+\.(?:[\w.]*\.)?(?:approx|ftz)[\w.]*)"
        return sorted(set(re.findall(pattern, self.assembly)))


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    options: Mapping[str, Any] | None = None,
) -> CompiledReport:
    """Compiles a `@triton.jit` function. `signature` has the type of every argument that is not in `constants`.

    Pointers ("*fp32") count as aligned to 16 bytes, as torch's allocations are. `options` are those of a launch:
    num_warps, num_stages and always enable_fp_fusion, whose default is about to change in Triton.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    key = [triton.__version__, kernel.cache_key, types, {n: repr(v) for n, v in constants.items()}, target]
    digest = hashlib.sha256(json.dumps([*key, dict(options or {})], sort_keys=True).encode()).hexdigest()
    cached = cache_folders()[0] / "aot" / f"{kernel.__name__}-{target}-{digest[:24]}.json"
    if cached.exists():
        return CompiledReport(**json.loads(cached.read_text()))
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n, one in types.items() if one.startswith("*")},
    )
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=dict(options or {}))
    report = _nvidia(compiled) if target.startswith("sm_") else _amd(compiled)
    cached.parent.mkdir(parents=True, exist_ok=True)
    replace_file(cached, json.dumps(asdict(report)).encode())
    return report


def _nvidia(compiled: Any) -> CompiledReport:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"\b{name}:(\d+)", said)[-1]) for name in ("REG", "STACK", "LOCAL"))
    return CompiledReport(stack + local, registers, compiled.metadata.shared, compiled.asm["ptx"])


def _amd(compiled: Any) -> CompiledReport:
    text = compiled.asm["amdgcn"]
    vector, scratch = (
        int(re.findall(rf"\.{n}:\s*(\d+)", text)[-1]) for n in ("vgpr_count", "private_segment_fixed_size")
    )
    return CompiledReport(scratch, vector, compiled.metadata.shared, text)
