"""How much memory servers hold, in the kernel's words."""

from __future__ import annotations

from benchmarks.programs.servers import environment, megabytes

STATUS = "Name:\tpython\nVmRSS:\t  500000 kB\nRssAnon:\t  300000 kB\nRssFile:\t   80000 kB\nRssShmem:\t  120000 kB\n"


def test_the_kernels_words_are_read():
    assert megabytes(STATUS) == {"all": 512.0, "own": 307.2, "shared": 122.88, "files": 81.92}
    assert megabytes("Name:\tkthreadd\n") == {}
    assert environment("A=b=c\0DMLC_ROLE=server\0\0") == {"A": "b=c", "DMLC_ROLE": "server"}
