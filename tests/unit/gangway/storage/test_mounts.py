"""A bucket that is mounted as a folder is known by the table of mounts, and refused as storage before a machine is taken."""

import os

import pytest

from gangway.storage import mounts
from gangway.storage.documents import StorageError
from gangway.storage.mounts import Mount, mount_of, parse, problem_of
from gangway.storage.probe import check_writable

TABLE = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
25 22 0:23 / /proc rw,nosuid,nodev,noexec - proc proc rw
40 22 0:35 / /tmp rw,nosuid shared:2 - tmpfs tmpfs rw
41 22 0:36 / /mnt/gcs rw,nosuid,nodev,relatime shared:3 master:1 - fuse.gcsfuse my-bucket rw,user_id=0,group_id=0,allow_other
42 22 0:37 / /mnt/gcs/disk rw - nfs4 filer:/a rw,vers=4.2
43 22 0:38 / /mnt/my\040s3 rw,nosuid,nodev - fuse.s3fs s3fs rw,user_id=0,group_id=0
44 22 0:39 / /mnt/cloud rw - fuse.rclone remote:bucket rw
45 22 0:40 / /mnt/goofys rw - fuse.goofys bucket:prefix rw
46 22 0:41 / /mnt/amazon rw,nosuid,nodev,noatime - fuse mountpoint-s3 rw,user_id=0
47 22 0:42 /runs /mnt/bound rw - fuse.geesefs bucket rw
48 22 0:43 / /mnt/ssh rw - fuse.sshfs host:/a rw
49 22 0:44 / /mnt/hidden rw - fuse.gcsfuse my-bucket rw
50 22 8:2 / /mnt/hidden rw - xfs /dev/sdb1 rw
a line of another form
51 22 0:45 / /short -
"""


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "TABLE", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text(TABLE)
    return tmp_path / "mountinfo"


def test_the_table_is_read_with_escapes_and_optional_fields():
    found = list(parse(TABLE))
    assert len(found) == 13
    assert found[3] == Mount("/mnt/gcs", "fuse.gcsfuse", "my-bucket")
    assert found[5] == Mount("/mnt/my s3", "fuse.s3fs", "s3fs")


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/mnt/gcs/runs/a", "/mnt/gcs"),
        ("/mnt/gcs", "/mnt/gcs"),
        ("/mnt/gcs2/runs", "/"),
        ("/mnt/gcs/disk/runs", "/mnt/gcs/disk"),
        ("/mnt/gcs/disk/../runs", "/mnt/gcs"),
    ],
)
def test_a_path_is_on_the_mount_that_is_nearest_above_it(path, folder):
    assert mount_of(path, list(parse(TABLE))).folder == folder


@pytest.mark.parametrize(
    ("path", "program", "lacks", "instead"),
    [
        ("/mnt/gcs/runs/a", "gcsfuse", "renames a folder object by object", "storage=gs://BUCKET/PREFIX"),
        ("/mnt/my s3/a", "s3fs", "lets two machines create one file", "storage=s3://BUCKET/PREFIX"),
        ("/mnt/cloud/a", "rclone", "sends files after they were closed", "storage=s3://"),
        ("/mnt/goofys/a", "goofys", "lets the last of several writers win", "storage=s3://"),
        ("/mnt/amazon/a", "mountpoint-s3", "cannot rename a folder", "storage=s3://"),
        ("/mnt/bound/a", "geesefs", "sends files after they were closed", "storage=s3://"),
    ],
)
def test_a_mounted_bucket_is_refused_by_name_with_what_it_lacks(path, program, lacks, instead):
    with pytest.raises(StorageError) as refused:
        check_writable(path)
    said = str(refused.value)
    assert said.startswith(f"storage: {path} is in a bucket that {program} has mounted at /mnt/")
    assert lacks in said
    assert instead in said


@pytest.mark.parametrize("path", ["/home/a/runs", "/mnt/gcs/disk/a", "/mnt/ssh/a", "/mnt/hidden/a"])
def test_other_mounts_are_tried(path):
    assert problem_of(path) == ""


def test_a_link_into_a_mounted_bucket_is_one(tmp_path):
    os.symlink("/mnt/gcs", tmp_path / "link")
    assert "gcsfuse has mounted at /mnt/gcs" in problem_of(tmp_path / "link" / "a")


def test_without_a_table_nothing_is_known(table):
    table.unlink()
    assert problem_of("/mnt/gcs/a") == ""
