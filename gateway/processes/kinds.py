"""What the server and its frontend processes say to each other, besides what all channels have."""

from gateway.processes import frames


class Kind(frames.Kind):
    """Of an answer of gRPC, END is headed: status, details, trailing metadata.

    An answer of HTTP that is aborted drops its client.
    """

    SETTINGS = 16  # headed; to a frontend, first of all
    HTTP_CALL = 17  # headed: the request's head, and the first piece of its body
    GRPC_CALL = 18  # headed: path and metadata, and the message if only one comes
    HEAD = 19  # headed: the answer's head, initial metadata
    WHOLE = 20  # headed: an HTTP answer with status 200, and its body
    STOP_HTTP = 22  # accept nothing more, and drop all in so many milliseconds: a number
    DROP_HALF = 23  # drop those of whose request only a part has come
    STOP_GRPC = 24  # take no more RPCs
    CUT_OFF = 25  # drop all RPCs in so many milliseconds: a number
    WANTED = 26  # the rest of a request's body is wanted
    LOG = 27  # headed: how to log from now on
