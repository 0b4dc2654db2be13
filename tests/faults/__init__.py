"""The fault matrix: what goes wrong on a host, and what the page must show at once, 10 seconds later and once healed.

A row (:class:`tests.faults.matrix.Row`) is a fault and what is promised of the page while it lasts. Each has a real
daemon of its own on a made-up host with cards of all three vendors (:mod:`tests.truth`), whose every reading tells
whose it is and of when. A row's scenario is:

1. the daemon is started, with the fault already there (``when="start"``), or is well first (``running``), or has a
   scrape that waits (``waiting``);
2. the fault is inflicted; the next page must be as ``at_once`` says, in time;
3. for ten seconds pages are asked for; the last must be as ``later`` says;
4. the fault is healed; within ``heals_within`` seconds a page must be as ``healed`` says, with nobody's help;
5. the fault is inflicted once more, and the daemon told to end while a scrape waits: it ends with status 0, in time,
   and no child of its own is left.

On every page in all of this, whatever the row says: no reading is another card's or of another time than now, no
number stands for *unknown*, no series comes twice, every fleet index is the card that the fleet's mask says, and all
cards that the row does not name are there with all their readings.

To add a row, write it into the file of its subject, whose ``ROWS`` :mod:`tests.faults.table` puts together. Say in
:class:`tests.faults.matrix.Expect` what differs from a host that is well; what is expected comes from what the
documents promise, the runbook's reasons above all, and not from what the program was seen to do. Check that the row
fails where the promise is broken. Rows run beside each other, since each mostly waits; one chosen by ``-k`` runs alone.
"""
