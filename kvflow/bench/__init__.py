"""What is reported about speed comes from here: `kvflow bench`, each figure beside a peer or a physical limit of the run."""
