"""Run code in a process that is forked from the test."""

import os
import signal
import warnings
from collections.abc import Callable


def in_forked_process(work: Callable[[], object], *, seconds: int = 20) -> str:
    """Return what work gave in a forked process, as text, or the type and the text of its error.

    Nothing else of this process runs there. After some seconds it is ended, and the text is empty.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text
