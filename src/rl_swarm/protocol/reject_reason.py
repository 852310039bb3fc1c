"""Names the reasons for which a node does not use what a peer has sent."""

from enum import Enum


class RejectReason(str, Enum):
    """Explain why a document or a rollout is not used; the values stand in logs, metrics and on the page.

    docs/security.md has the same list.
    """

    # It cannot be read.
    UNREADABLE = "unreadable"  # the store or the peer does not hand it out
    SIZE = "size"  # too many bytes, compressed or not
    GZIP = "gzip"  # no whole gzip stream
    JSON = "json"  # no JSON
    DEPTH = "depth"  # nested too deeply
    ITEMS = "items"  # too many values, or values that take too much memory
    TEXT = "text"  # a string that is too long
    NUMBER = "number"  # a number that is too long
    SCHEMA = "schema"  # fields or types that do not fit the record

    # It does not come from the right peer, or does not belong here.
    DIGEST = "digest"  # half-written or altered: the digest does not fit the content
    SIGNATURE = "signature"  # not signed by the peer that it names
    OWNER = "owner"  # not signed by the key that alone may write it
    SWARM = "swarm"  # written for another swarm
    PLACE = "place"  # written for another round, stage or node
    NAME = "name"  # no name of a node, or the name of another peer
    INVITATION = "invitation"  # an invitation that does not hold for this peer
    ADMISSION = "admission"  # its author is not admitted
    PEER = "peer"  # its author is not the member of that name

    # Its rollouts are not what this peer was to publish.
    LIMITS = "limits"  # more questions, completions or characters than the manifest allows
    QUESTION = "question"  # not the question that this peer was asked, or questions are left out
    ROLE = "role"  # a role that the environment does not have
    PARENTS = "parents"  # this node cannot retrace which messages the question was made from
    SLOW = "slow"  # its questions or scores took too long to regenerate
    COPY = "copy"  # the same long text as another source's
    UNLIKELY = "unlikely"  # this node's model would hardly write it

    def __str__(self) -> str:  # format() differs between versions of Python
        return self.value
