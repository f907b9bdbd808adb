"""What the server and the clients of a shared engine say to each other, besides what all do."""

from gateway.processes.channel import FrameKind


class Kind(FrameKind):
    """A piece of DATA is one response; numbers of calls are the server's."""

    SETTINGS = 16  # to a client, first of all: `ClientSettings`
    READY = 17  # `Offer`
    FAILED = 18  # an error: the client cannot serve
    REQUEST = 19  # a call begins: a request
    REFUSED = 20  # a call ends: an error
    WASTED = 21  # so many tokens had been made when nobody waited any more: a number
    STOPPED = 22  # the engine has stopped: why, as text
    LOG = 23  # a record of the client's log
