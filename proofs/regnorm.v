(** RegNorm's penalty, chapter 440: with every sample divided by its root mean
    square over the units, the mean over pairs of samples of the sum over units
    of (z_i^a + z_i^b)^2 - 2 is twice the sum of the squared means, and 2 N
    times the mean cosine; it lies between 0 and 2 N, is 0 exactly where every
    mean is 0, and 2 N exactly where all samples have one direction. Samples and
    units are finite lists of any length; the batch is not empty, and no
    sample is 0 in all its units. *)
From Coq Require Import Reals List Lra.
From normalnorm Require Import sums.
Import ListNotations.
Open Scope R_scope.

Section RegNorm.
Context {Sample Unit : Type}.
Variables (batch : list Sample) (units : list Unit) (z : Sample -> Unit -> R).

Definition N : R := INR (length units).
Definition rms (a : Sample) : R := sqrt (mean (fun i => z a i ^ 2) units).
Definition divided (a : Sample) (i : Unit) : R := z a i / rms a.

Definition penalty : R :=
  mean (fun a => mean (fun b =>
    sum (fun i => (divided a i + divided b i) ^ 2 - 2) units) batch) batch.

Definition mean_of (i : Unit) : R := mean (fun a => divided a i) batch.

Definition length_of (a : Sample) : R := sqrt (sum (fun i => z a i ^ 2) units).
Definition cosine (a b : Sample) : R :=
  sum (fun i => z a i * z b i) units / (length_of a * length_of b).
Definition mean_cosine : R :=
  mean (fun a => mean (fun b => cosine a b) batch) batch.

Definition scaled : Prop := forall a, In a batch -> rms a <> 0.

Lemma rms_square a :
  rms a <> 0 -> rms a ^ 2 * N = sum (fun i => z a i ^ 2) units.
Proof.
  intros nz. unfold rms in *. rewrite pow2_sqrt.
  - unfold mean, N. destruct units as [|i u]; [simpl; ring|].
    field. apply Rgt_not_eq, length_pos; easy.
  - destruct (Rle_dec 0 (mean (fun i => z a i ^ 2) units)); [easy|].
    now rewrite sqrt_neg_0 in nz by lra.
Qed.

Lemma power a : rms a <> 0 -> sum (fun i => divided a i ^ 2) units = N.
Proof.
  intros nz. unfold divided.
  rewrite (sum_ext _ (fun i => / rms a ^ 2 * z a i ^ 2))
    by (intros; field; easy).
  rewrite sum_scal, <- rms_square by easy. field. easy.
Qed.

Lemma units_some a : rms a <> 0 -> 0 < N.
Proof.
  intros nz. unfold N. apply length_pos. intros none. apply nz.
  unfold rms, mean. rewrite none. simpl. unfold Rdiv. rewrite Rmult_0_l.
  apply sqrt_0.
Qed.

Lemma length_rms a : rms a <> 0 -> length_of a = rms a * sqrt N.
Proof.
  intros nz. unfold length_of. rewrite <- rms_square by easy.
  pose proof (units_some a nz) as pos.
  rewrite sqrt_mult; [|apply pow2_ge_0|lra].
  rewrite sqrt_pow2; [easy|apply sqrt_pos].
Qed.

Lemma rms_pos a : rms a <> 0 -> 0 < rms a.
Proof. intros nz. pose proof (sqrt_pos (mean (fun i => z a i ^ 2) units)).
  unfold rms in *. lra. Qed.

Lemma cosine_divided a b : rms a <> 0 -> rms b <> 0 ->
  sum (fun i => divided a i * divided b i) units = N * cosine a b.
Proof.
  intros na nb. unfold cosine, divided. rewrite !length_rms by easy.
  pose proof (units_some a na) as pos.
  pose proof (sqrt_sqrt N) as root. specialize (root ltac:(lra)).
  assert (sqrt N <> 0) by (intros zero; rewrite zero in root; lra).
  rewrite (sum_ext _ (fun i => / (rms a * rms b) * (z a i * z b i)))
    by (intros; field; easy).
  rewrite sum_scal. rewrite <- root at 1. field. auto.
Qed.

Lemma mean_sum (g : Sample -> Unit -> R) :
  mean (fun a => sum (g a) units) batch
  = sum (fun i => mean (fun a => g a i) batch) units.
Proof.
  unfold mean. rewrite sum_swap. unfold Rdiv. rewrite Rmult_comm.
  rewrite <- sum_scal. apply sum_ext. intros; ring.
Qed.

Hypothesis some : batch <> [].
Hypothesis nonzero : scaled.

Lemma penalty_means : penalty = 2 * sum (fun i => mean_of i ^ 2) units.
Proof.
  unfold penalty.
  rewrite (mean_ext _
    (fun a => 2 * sum (fun i => divided a i * mean_of i) units)).
  - rewrite mean_scal, mean_sum. f_equal. apply sum_ext. intros i _.
    rewrite (mean_ext _ (fun a => mean_of i * divided a i)) by (intros; ring).
    rewrite mean_scal. fold (mean_of i). ring.
  - intros a inside.
    rewrite (mean_ext _ (fun b =>
      2 * sum (fun i => divided a i * divided b i) units)).
    + rewrite mean_scal, mean_sum. f_equal. apply sum_ext. intros i _.
      now rewrite mean_scal.
    + intros b inside_b.
      rewrite (sum_ext _ (fun i => divided a i ^ 2 + (divided b i ^ 2
        + (2 * (divided a i * divided b i) + -2)))) by (intros; ring).
      rewrite !sum_plus, sum_scal, sum_const, !power by (now apply nonzero).
      fold N. ring.
Qed.

Lemma penalty_cosines : penalty = 2 * N * mean_cosine.
Proof.
  unfold penalty, mean_cosine. rewrite <- mean_scal.
  apply mean_ext. intros a inside. rewrite <- mean_scal.
  apply mean_ext. intros b inside_b.
  rewrite Rmult_assoc, <- cosine_divided by (now apply nonzero).
  rewrite (sum_ext _ (fun i => divided a i ^ 2 + (divided b i ^ 2
    + (2 * (divided a i * divided b i) + -2)))) by (intros; ring).
  rewrite !sum_plus, sum_scal, sum_const, !power by (now apply nonzero).
  fold N. ring.
Qed.

(** 2 N less the penalty is a mean of squared distances. *)
Lemma penalty_distances : 2 * N - penalty
  = mean (fun a => mean (fun b =>
      sum (fun i => (divided a i - divided b i) ^ 2) units) batch) batch.
Proof.
  unfold penalty. rewrite <- (mean_const (2 * N) batch some) at 1.
  unfold Rminus at 1. rewrite <- (Rmult_1_l (mean (fun a => mean _ _) _)) at 1.
  rewrite Ropp_mult_distr_l, <- mean_scal, <- mean_plus.
  apply mean_ext. intros a inside.
  rewrite <- (mean_const (2 * N) batch some) at 1.
  rewrite <- mean_scal, <- mean_plus.
  apply mean_ext. intros b inside_b.
  rewrite (sum_ext (fun i => (divided a i + divided b i) ^ 2 - 2)
    (fun i => divided a i ^ 2 + (divided b i ^ 2
    + (2 * (divided a i * divided b i) + -2)))) by (intros; ring).
  rewrite (sum_ext (fun i => (divided a i - divided b i) ^ 2)
    (fun i => divided a i ^ 2 + (divided b i ^ 2
    + -2 * (divided a i * divided b i)))) by (intros; ring).
  rewrite !sum_plus, !sum_scal, sum_const, !power by (now apply nonzero).
  fold N. ring.
Qed.

End RegNorm.

Theorem regnorm : forall (Sample Unit : Type) (batch : list Sample)
  (units : list Unit) (z : Sample -> Unit -> R),
  batch <> [] -> (forall a, In a batch -> rms units z a <> 0) ->
  penalty batch units z
  = 2 * sum (fun i => mean_of batch units z i ^ 2) units /\
  penalty batch units z = 2 * N units * mean_cosine batch units z /\
  0 <= penalty batch units z <= 2 * N units /\
  (penalty batch units z = 0 <->
   forall i, In i units -> mean_of batch units z i = 0) /\
  (penalty batch units z = 2 * N units <->
   forall a b, In a batch -> In b batch ->
   forall i, In i units -> divided units z a i = divided units z b i).
Proof.
  intros Sample Unit batch units z some scaled.
  pose proof (penalty_means batch units z scaled) as means.
  pose proof (penalty_distances batch units z some scaled) as far.
  assert (squares : forall a b,
    0 <= sum (fun i => (divided units z a i - divided units z b i) ^ 2) units)
    by (intros; apply sum_nonneg; intros; apply pow2_ge_0).
  assert (inner : forall a, 0 <= mean (fun b =>
    sum (fun i => (divided units z a i - divided units z b i) ^ 2) units) batch)
    by (intros; apply mean_nonneg; auto).
  assert (outer := mean_nonneg _ batch some (fun a _ => inner a)).
  assert (power := sum_nonneg (fun i => mean_of batch units z i ^ 2) units
    (fun i _ => pow2_ge_0 _)).
  split; [easy|]. split; [now apply penalty_cosines|]. split; [lra|]. split.
  - rewrite means. split.
    + intros zero i inside.
      assert (square : mean_of batch units z i ^ 2 = 0).
      { apply (sum_zero (fun i => mean_of batch units z i ^ 2) units); auto.
        - intros; apply pow2_ge_0.
        - lra. }
      simpl in square. rewrite Rmult_1_r in square.
      now apply Rsqr_0_uniq.
    + intros zero. rewrite (sum_ext _ (fun _ => 0)).
      * rewrite sum_const; ring.
      * intros i inside. rewrite zero by easy. ring.
  - split.
    + intros top a b at_a at_b i inside.
      rewrite top, Rminus_diag_eq in far by easy. symmetry in far.
      pose proof (mean_zero _ batch (fun a _ => inner a) far a at_a) as one.
      pose proof (mean_zero _ batch (fun b _ => squares a b) one b at_b) as two.
      pose proof (sum_zero _ units (fun i _ => pow2_ge_0 _) two i inside)
        as three.
      simpl in three. rewrite Rmult_1_r in three.
      apply Rsqr_0_uniq in three. lra.
    + intros same. symmetry. apply Rminus_diag_uniq. rewrite far.
      rewrite (mean_ext _ (fun _ => 0)); [now apply mean_const|].
      intros a at_a. rewrite (mean_ext _ (fun _ => 0)); [now apply mean_const|].
      intros b at_b. rewrite (sum_ext _ (fun _ => 0)).
      * rewrite sum_const; ring.
      * intros i inside. rewrite (same a b) by easy. ring.
Qed.

(** ** Mutants, which Coq refuses *)

(** The last line as the paper prints it, a mean of squares: with two samples
    that point away from each other it is 2 N, and the penalty 0. *)
Theorem regnorm_mutant : ~ forall (batch units : list R) (z : R -> R -> R),
  batch <> [] -> (forall a, In a batch -> rms units z a <> 0) ->
  penalty batch units z
  = 2 * sum (fun i => mean (fun a => divided units z a i ^ 2) batch) units.
Proof.
  intros wrong. specialize (wrong [1; -1] [0] (fun a _ => a)).
  assert (same : forall a, a = 1 \/ a = -1 -> rms [0] (fun a _ => a) a = 1).
  { intros a which. unfold rms, mean. simpl.
    replace ((a * (a * 1) + 0) / 1) with 1; [apply sqrt_1|].
    destruct which as [-> | ->]; field. }
  assert (scaled : forall a, In a [1; -1] -> rms [0] (fun a _ => a) a <> 0).
  { intros a inside. rewrite same; [lra|]. simpl in inside.
    destruct inside as [<-|[<-|[]]]; auto. }
  specialize (wrong ltac:(easy) scaled).
  unfold penalty, divided, mean in wrong; simpl in wrong.
  rewrite !same in wrong by auto. lra.
Qed.

(** Without the division: one sample and one unit, of value 2. *)
Theorem regnorm_mutant_undivided : ~ forall (batch units : list R)
  (z : R -> R -> R), batch <> [] ->
  mean (fun a => mean (fun b =>
    sum (fun i => (z a i + z b i) ^ 2 - 2) units) batch) batch
  = 2 * sum (fun i => mean (fun a => z a i) batch ^ 2) units.
Proof.
  intros wrong. specialize (wrong [2] [0] (fun a _ => a) ltac:(easy)).
  unfold mean in wrong; simpl in wrong. lra.
Qed.

(** With 1 in place of the 2 the last step of the proof does not close. *)
Goal forall n c : R, n + (n + (2 * (n * c) + n * -1)) = 2 * (n * c).
Proof.
  intros. Fail ring.
Abort.

Print Assumptions regnorm.
Print Assumptions regnorm_mutant.
Print Assumptions regnorm_mutant_undivided.
