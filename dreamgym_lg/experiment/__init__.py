"""An experiment: collect, train_experience, train_base, train and prove, on any world."""
