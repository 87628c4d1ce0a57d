"""Print the seconds that `import iglens_tl` takes after `import transformer_lens`, and those of its first use."""

import time

import transformer_lens  # noqa: F401

start = time.perf_counter()
import iglens_tl  # noqa: E402

imported = time.perf_counter()
_ = iglens_tl.ig_lens
used = time.perf_counter()
print(imported - start, used - imported)
