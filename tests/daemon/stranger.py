"""A client under another user id: reads requests as JSON from stdin, one a line, and writes what came of each.

    ["open", NAME, PRIORITY, WEIGHT]         job id, or the refusal
    ["load", JOB, BYTES OF STATE]            "", or the refusal
    ["change", JOB, PRIORITY or null, WEIGHT or null], ["pause", JOB], ["stop", JOB]
    ["status"]                               the jobs as this user sees them
A refusal is {"code": ..., "message": ..., "remedy": ...}.
"""

from __future__ import annotations

import json
import sys
import uuid

from gpumux.client.session import Session
from gpumux.errors import GpumuxError
from gpumux.program import codec
from gpumux.wire import messages as msg
from tests.program import samples


def do(session: Session, what: str, *args):
    if what == "open":
        name, priority, weight = args
        job = uuid.uuid4().hex
        session.register(job, lambda message, frames: None)
        session.call(msg.OpenJob(0, job, name, priority, weight, 1.1, None, 2, 0))
        return job
    if what == "load":
        job, nbytes = args
        session.call(msg.LoadProgram(0, job, 0, [nbytes], [0]), [codec.encode(samples.counter())])
        return ""
    if what == "status":
        return session.call(msg.GetStatus(0))[0].body["jobs"]
    requests = {
        "change": lambda: msg.ChangeJob(0, *args),
        "pause": lambda: msg.PauseJob(0, *args),
        "stop": lambda: msg.CloseJob(0, *args, False),
    }
    session.call(requests[what]())
    return ""


def main(endpoint: str) -> None:
    with Session.connect(endpoint) as session:
        for line in sys.stdin:
            try:
                answer = do(session, *json.loads(line))
            except GpumuxError as error:
                answer = {"code": error.code, "message": error.message, "remedy": error.remedy}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
