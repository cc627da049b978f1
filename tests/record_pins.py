"""Record `fixtures/pins`: what the code computes now, for `test_pins.py` to hold later code against.

    OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv/bin/python tests/record_pins.py

Run once, at commit 65e44cd, the last before the frame of `src/luna_hf` was rewritten. To run it again means to accept
whatever the code computes by then: only after a change that is meant to change numbers.
"""

import shutil

import pin_folders
from pins import CASES, FOLDER, TOLERANCE, compute, differences, expected, save


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for case in CASES.values():
        save(FOLDER / f"{case.name}.safetensors", compute(case))
        # One record serves every way of computing it, so they must agree much better than is asked of later code.
        for backend, gradients in (("sdpa", True), ("eager", False), ("sdpa", False)):
            lines = differences(compute(case, backend, gradients), expected(case, backend, gradients), TOLERANCE / 10)
            if lines:
                raise SystemExit(f"{case.name} with {backend}: {lines}")
    pin_folders.record()
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    print(f"{len(CASES)} models, {size / 1e6:.2f} MB in {FOLDER}")


if __name__ == "__main__":
    main()
