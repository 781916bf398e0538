(** The negative log-likelihood of Yeo and Johnson's power transform is convex
    in lambda, over all real lambda, for every finite sample that is not
    constant (chapter 220). Of a constant sample the variance is 0, and its
    logarithm does not exist. *)
From Coq Require Import Reals List Lra Psatz.
From Coquelicot Require Import Coquelicot.
From normalnorm Require Import sums yeo_johnson.
Import ListNotations.
Open Scope R_scope.

(** ** Log-convexity, in a form that is linear in the function *)

(** F (nu) <= F (lambda)^(1-w) F (mu)^w, with the power mean bounded by any
    tangent plane; exp a and exp b are free positive numbers. *)
Definition log_convex (F : R -> R) : Prop := forall lambda mu w a b,
  0 <= w <= 1 -> F ((1 - w) * lambda + w * mu) <= exp ((1 - w) * a + w * b)
    * ((1 - w) * (F lambda * exp (- a)) + w * (F mu * exp (- b))).

Lemma exp_convex u v w :
  0 <= w <= 1 -> exp ((1 - w) * u + w * v) <= (1 - w) * exp u + w * exp v.
Proof.
  intros range. set (m := (1 - w) * u + w * v).
  assert (tangent : forall x, exp m * (1 + (x - m)) <= exp x).
  { intros x. replace (exp x) with (exp m * exp (x - m))
      by (rewrite <- exp_plus; f_equal; ring).
    apply Rmult_le_compat_l; [apply Rlt_le, exp_pos|apply exp_ineq1_le]. }
  pose proof (Rmult_le_compat_l (1 - w) _ _ ltac:(lra) (tangent u)).
  pose proof (Rmult_le_compat_l w _ _ ltac:(lra) (tangent v)).
  replace (exp m) with ((1 - w) * (exp m * (1 + (u - m)))
    + w * (exp m * (1 + (v - m)))) by (unfold m; ring). lra.
Qed.

Lemma log_convex_exp k s : log_convex (fun lambda => exp ((lambda - k) * s)).
Proof.
  intros lambda mu w a b range.
  rewrite <- !exp_plus.
  eapply Rle_trans; [|apply Rmult_le_compat_l;
    [apply Rlt_le, exp_pos|apply (exp_convex _ _ w range)]].
  rewrite <- exp_plus. apply Req_le. f_equal. ring.
Qed.

Lemma log_convex_ext F G :
  (forall lambda, F lambda = G lambda) -> log_convex F -> log_convex G.
Proof. intros same convex lambda mu w a b. rewrite <- !same. apply convex. Qed.

Lemma log_convex_plus F G :
  log_convex F -> log_convex G -> log_convex (fun l => F l + G l).
Proof.
  intros one two lambda mu w a b range.
  pose proof (one lambda mu w a b range).
  pose proof (two lambda mu w a b range).
  lra.
Qed.

Lemma log_convex_mean {A} (F : A -> R -> R) (l : list A) :
  l <> [] -> (forall x, In x l -> log_convex (F x)) ->
  log_convex (fun lambda => mean (fun x => F x lambda) l).
Proof.
  intros some each lambda mu w a b range.
  eapply Rle_trans;
    [apply (mean_le _ _ l some (fun x i => each x i lambda mu w a b range))|].
  rewrite mean_scal, mean_plus, !mean_scal. apply Req_le.
  rewrite (mean_ext (fun x => F x lambda * exp (- a))
    (fun x => exp (- a) * F x lambda)) by (intros; ring).
  rewrite (mean_ext (fun x => F x mu * exp (- b))
    (fun x => exp (- b) * F x mu)) by (intros; ring).
  rewrite !mean_scal. ring.
Qed.

Lemma log_convex_square F :
  (forall l, 0 <= F l) -> log_convex F -> log_convex (fun l => F l ^ 2).
Proof.
  intros pos convex lambda mu w a b range.
  pose proof (convex lambda mu w (a / 2) (b / 2) range) as half.
  set (p := F lambda * exp (- (a / 2))) in *.
  set (q := F mu * exp (- (b / 2))) in *.
  set (e := exp ((1 - w) * (a / 2) + w * (b / 2))) in *.
  replace (exp ((1 - w) * a + w * b)) with (e ^ 2)
    by (unfold e; simpl; rewrite Rmult_1_r, <- exp_plus; f_equal; field).
  replace (F lambda ^ 2 * exp (- a)) with (p ^ 2).
  2: { unfold p. replace (exp (- a)) with (exp (- (a / 2)) ^ 2); [ring|].
    simpl; rewrite Rmult_1_r, <- exp_plus; f_equal; field. }
  replace (F mu ^ 2 * exp (- b)) with (q ^ 2).
  2: { unfold q. replace (exp (- b)) with (exp (- (b / 2)) ^ 2); [ring|].
    simpl; rewrite Rmult_1_r, <- exp_plus; f_equal; field. }
  eapply Rle_trans; [apply pow_incr; split; [apply pos|exact half]|].
  rewrite Rpow_mult_distr. apply Rmult_le_compat_l; [apply pow2_ge_0|].
  assert (0 <= w * (1 - w) * (p - q) ^ 2)
    by (apply Rmult_le_pos; [nra|apply pow2_ge_0]).
  nra.
Qed.

(** ** The transform on one side of 0 *)

Definition P (lambda x : R) : R := expm1_over lambda (ln (1 + x)).

Lemma P_derive lambda x :
  0 <= x -> is_derive (P lambda) x (exp ((lambda - 1) * ln (1 + x))).
Proof.
  intros pos. unfold P, expm1_over. destruct (Req_EM_T lambda 0) as [->|nz].
  - auto_derive; [lra|].
    replace ((0 - 1) * ln (1 + x)) with (- ln (1 + x)) by ring.
    rewrite exp_Ropp, exp_ln by lra. field. lra.
  - auto_derive; [lra|].
    replace ((lambda - 1) * ln (1 + x))
      with (lambda * ln (1 + x) + - ln (1 + x)) by ring.
    rewrite exp_plus, exp_Ropp, exp_ln by lra. field. lra.
Qed.

Lemma P_0 lambda : P lambda 0 = 0.
Proof.
  unfold P, expm1_over. rewrite Rplus_0_r, ln_1, Rmult_0_r, exp_0.
  destruct (Req_EM_T lambda 0); [easy|]. field. easy.
Qed.

(** A function whose derivative is not negative does not fall. *)
Lemma rises (F F' : R -> R) x y : x <= y ->
  (forall t, x <= t -> is_derive F t (F' t)) ->
  (forall t, x <= t -> 0 <= F' t) -> F x <= F y.
Proof.
  intros order derive pos. destruct (Req_dec x y) as [->|apart]; [lra|].
  destruct (MVT_cor2 F F' x y) as [t [E inside]]; [lra|..].
  - intros t range. apply is_derive_Reals, derive. lra.
  - pose proof (Rmult_le_pos (F' t) (y - x) (pos t ltac:(lra)) ltac:(lra)). lra.
Qed.

Lemma P_rises lambda x y : 0 <= x <= y -> P lambda x <= P lambda y.
Proof.
  intros order. apply (rises _ (fun t => exp ((lambda - 1) * ln (1 + t))));
    [lra|intros; apply P_derive; lra|intros; apply Rlt_le, exp_pos].
Qed.

Lemma P_rises_strictly lambda x y : 0 <= x < y -> P lambda x < P lambda y.
Proof.
  intros order.
  destruct (MVT_cor2 (P lambda) (fun t => exp ((lambda - 1) * ln (1 + t))) x y)
    as [t [E inside]]; [lra|..].
  - intros t range. apply is_derive_Reals, P_derive. lra.
  - pose proof (Rmult_lt_0_compat _ (y - x)
      (exp_pos ((lambda - 1) * ln (1 + t)))
      ltac:(lra)). lra.
Qed.

Lemma P_log_convex x y :
  0 <= x <= y -> log_convex (fun lambda => P lambda y - P lambda x).
Proof.
  intros order lambda mu w a b range.
  set (nu := (1 - w) * lambda + w * mu).
  set (c := exp ((1 - w) * a + w * b)).
  pose (G := fun t => c * ((1 - w) * (P lambda t * exp (- a))
    + w * (P mu t * exp (- b))) - P nu t).
  pose (e := fun l t => exp ((l - 1) * ln (1 + t))).
  enough (G x <= G y) by (unfold G in *; lra).
  apply (rises G (fun t => c * ((1 - w) * (e lambda t * exp (- a))
    + w * (e mu t * exp (- b))) - e nu t)); [lra|..]; intros t above.
  - pose proof (P_derive lambda t ltac:(lra)) as d1.
    pose proof (P_derive mu t ltac:(lra)) as d2.
    pose proof (P_derive nu t ltac:(lra)) as d3.
    unfold G. auto_derive.
    + repeat split; eexists; eassumption.
    + replace (Derive (fun t => P lambda t) t) with (e lambda t)
        by (symmetry; now apply is_derive_unique).
      replace (Derive (fun t => P mu t) t) with (e mu t)
        by (symmetry; now apply is_derive_unique).
      replace (Derive (fun t => P nu t) t) with (e nu t)
        by (symmetry; now apply is_derive_unique).
      ring.
  - pose proof (log_convex_exp 1 (ln (1 + t)) lambda mu w a b range) as below.
    unfold e, c, nu. lra.
Qed.

Lemma log_convex_reflect F :
  log_convex F -> log_convex (fun lambda => F (2 - lambda)).
Proof.
  intros convex lambda mu w a b range.
  replace (2 - ((1 - w) * lambda + w * mu))
    with ((1 - w) * (2 - lambda) + w * (2 - mu)) by ring.
  now apply convex.
Qed.

(** ** Differences of transformed values *)

Lemma psi_parts x lambda :
  psi x lambda = P lambda (Rmax 0 x) - P (2 - lambda) (Rmax 0 (- x)).
Proof.
  unfold psi, sign. destruct (Rle_dec 0 x).
  - rewrite Rmax_right, Rmax_left, P_0, Rabs_pos_eq by lra.
    replace (1 + 1 * (lambda - 1)) with lambda by ring. unfold P. ring.
  - rewrite Rmax_left, Rmax_right, P_0, Rabs_left by lra.
    replace (1 + -1 * (lambda - 1)) with (2 - lambda) by ring. unfold P. ring.
Qed.

Lemma parts_order x y :
  x <= y -> 0 <= Rmax 0 x <= Rmax 0 y /\ 0 <= Rmax 0 (- y) <= Rmax 0 (- x).
Proof. intros. unfold Rmax. repeat destruct (Rle_dec _ _); lra. Qed.

Lemma psi_rises x y lambda : x <= y -> psi x lambda <= psi y lambda.
Proof.
  intros order. rewrite !psi_parts. destruct (parts_order x y order).
  pose proof (P_rises lambda (Rmax 0 x) (Rmax 0 y)).
  pose proof (P_rises (2 - lambda) (Rmax 0 (- y)) (Rmax 0 (- x))). lra.
Qed.

Lemma psi_rises_strictly x y lambda : x < y -> psi x lambda < psi y lambda.
Proof.
  intros order. rewrite !psi_parts. destruct (parts_order x y ltac:(lra)).
  pose proof (P_rises lambda (Rmax 0 x) (Rmax 0 y)).
  pose proof (P_rises (2 - lambda) (Rmax 0 (- y)) (Rmax 0 (- x))).
  destruct (Rle_lt_dec y 0).
  - assert (Rmax 0 (- y) < Rmax 0 (- x)) by (rewrite !Rmax_right; lra).
    pose proof (P_rises_strictly (2 - lambda) (Rmax 0 (- y)) (Rmax 0 (- x))).
    lra.
  - assert (Rmax 0 x < Rmax 0 y)
      by (unfold Rmax; repeat destruct (Rle_dec _ _); lra).
    pose proof (P_rises_strictly lambda (Rmax 0 x) (Rmax 0 y)). lra.
Qed.

Lemma psi_log_convex x y :
  x <= y -> log_convex (fun lambda => psi y lambda - psi x lambda).
Proof.
  intros order. destruct (parts_order x y order).
  apply (log_convex_ext (fun l => (P l (Rmax 0 y) - P l (Rmax 0 x))
    + (P (2 - l) (Rmax 0 (- x)) - P (2 - l) (Rmax 0 (- y))))).
  - intros l. rewrite !psi_parts. ring.
  - apply log_convex_plus; [now apply P_log_convex|].
    apply (log_convex_reflect
      (fun l => P l (Rmax 0 (- x)) - P l (Rmax 0 (- y)))).
    now apply P_log_convex.
Qed.

Lemma square_log_convex x y :
  log_convex (fun lambda => (psi x lambda - psi y lambda) ^ 2).
Proof.
  destruct (Rle_lt_dec y x) as [order|order].
  - apply log_convex_square; [|now apply psi_log_convex].
    intros l. pose proof (psi_rises y x l order). lra.
  - apply (log_convex_ext (fun l => (psi y l - psi x l) ^ 2));
      [intros; ring|].
    apply log_convex_square; [|apply psi_log_convex; lra].
    intros l. pose proof (psi_rises x y l ltac:(lra)). lra.
Qed.

(** ** The variance, a mean over pairs *)

Lemma variance_pairs h lambda : h <> [] ->
  mean (fun x => mean (fun y => (psi x lambda - psi y lambda) ^ 2) h) h
  = 2 * variance h lambda.
Proof.
  intros some. rewrite variance_squares by easy.
  set (m := mean (fun x => psi x lambda) h).
  set (s := mean (fun x => psi x lambda ^ 2) h).
  rewrite (mean_ext _
    (fun x => psi x lambda ^ 2 + (-2 * m * psi x lambda + s))).
  - rewrite !mean_plus, mean_scal, mean_const by easy. fold m s. ring.
  - intros x _.
    rewrite (mean_ext _ (fun y => psi x lambda ^ 2
      + (-2 * psi x lambda * psi y lambda + psi y lambda ^ 2)))
      by (intros; ring).
    rewrite !mean_plus, mean_scal, mean_const by easy. fold m s. ring.
Qed.

Definition constant (h : list R) : Prop :=
  forall x y, In x h -> In y h -> x = y.

Lemma variance_pos h lambda : ~ constant h -> 0 < variance h lambda.
Proof.
  intros varied. assert (some : h <> []) by (intros ->; now apply varied).
  assert (inner : forall x,
    0 <= mean (fun y => (psi x lambda - psi y lambda) ^ 2) h)
    by (intros; apply mean_nonneg; [easy|intros; apply pow2_ge_0]).
  pose proof (mean_nonneg _ h some (fun x _ => inner x)) as pos.
  pose proof (variance_pairs h lambda some) as pairs.
  destruct (Req_dec (variance h lambda) 0) as [zero|]; [|lra].
  exfalso. apply varied. intros x y at_x at_y.
  rewrite zero, Rmult_0_r in pairs.
  pose proof (mean_zero _ h (fun x _ => inner x) pairs x at_x) as one.
  pose proof (mean_zero _ h (fun y _ => pow2_ge_0 _) one y at_y) as two.
  simpl in two. rewrite Rmult_1_r in two. apply Rsqr_0_uniq in two.
  destruct (Rtotal_order x y) as [less|[same|more]]; [|easy|].
  - pose proof (psi_rises_strictly x y lambda less). lra.
  - pose proof (psi_rises_strictly y x lambda more). lra.
Qed.

Lemma ln_variance_convex h lambda mu w : ~ constant h -> 0 <= w <= 1 ->
  ln (variance h ((1 - w) * lambda + w * mu))
  <= (1 - w) * ln (variance h lambda) + w * ln (variance h mu).
Proof.
  intros varied range. assert (some : h <> []) by (intros ->; now apply varied).
  assert (convex : log_convex (fun l => 2 * variance h l)).
  { apply (log_convex_ext
      (fun l => mean (fun x => mean (fun y => (psi x l - psi y l) ^ 2) h) h)).
    - intros l. now apply variance_pairs.
    - apply (log_convex_mean
        (fun x l => mean (fun y => (psi x l - psi y l) ^ 2) h)); [easy|].
      intros x _. apply (log_convex_mean (fun y l => (psi x l - psi y l) ^ 2));
        [easy|]. intros y _. apply square_log_convex. }
  pose proof (variance_pos h lambda varied) as p1.
  pose proof (variance_pos h mu varied) as p2.
  specialize (convex lambda mu w (ln (variance h lambda))
    (ln (variance h mu)) range).
  simpl in convex. rewrite !exp_Ropp, !exp_ln in convex by easy.
  set (m := (1 - w) * ln (variance h lambda) + w * ln (variance h mu)) in *.
  rewrite <- (ln_exp m). apply ln_le; [now apply variance_pos|].
  replace ((1 - w) * (2 * variance h lambda * / variance h lambda)
    + w * (2 * variance h mu * / variance h mu)) with 2 in convex
    by (field; lra).
  lra.
Qed.

Theorem nll_convex : forall h : list R, ~ constant h ->
  forall lambda mu w : R, 0 <= w <= 1 ->
  nll h ((1 - w) * lambda + w * mu)
  <= (1 - w) * nll h lambda + w * nll h mu.
Proof.
  intros h varied lambda mu w range.
  pose proof (ln_variance_convex h lambda mu w varied range).
  unfold nll. lra.
Qed.

(** ** Mutants, which Coq refuses *)

(** The sample -1, 1 at lambda = 0, 1 and 2. *)
Lemma pair_values : exists k rise : R, 0 < rise /\
  nll [-1; 1] 0 = k + rise /\ nll [-1; 1] 1 = k /\ nll [-1; 1] 2 = k + rise.
Proof.
  exists ((ln (2 * PI) + 1) / 2), (ln ((ln 2 + 3 / 2) / 2)).
  assert (two : 1 / 2 < ln 2).
  { pose proof (exp_ineq1_le (- ln 2)) as below.
    rewrite exp_Ropp, exp_ln in below by lra.
    assert (ln 2 <> 1 / 2); [|lra]. intros half.
    assert (strict : 1 + - ln 2 < exp (- ln 2)) by (apply exp_ineq1; lra).
    rewrite exp_Ropp, exp_ln in strict by lra. lra. }
  assert (variances : forall lambda, variance [-1; 1] lambda
    = ((psi 1 lambda - psi (-1) lambda) / 2) ^ 2)
    by (intros; unfold variance, mean; simpl; field).
  assert (up : forall lambda, psi 1 lambda = expm1_over lambda (ln 2)).
  { intros. rewrite psi_parts, Rmax_right, Rmax_left, P_0 by lra. unfold P.
    replace (1 + 1) with 2 by ring. ring. }
  assert (down : forall lambda,
    psi (-1) lambda = - expm1_over (2 - lambda) (ln 2)).
  { intros. rewrite psi_parts, Rmax_left, Rmax_right, P_0 by lra. unfold P.
    replace (1 + - -1) with 2 by ring. ring. }
  assert (at_0 : expm1_over 0 (ln 2) = ln 2)
    by (unfold expm1_over; destruct (Req_EM_T 0 0); lra).
  assert (at_1 : expm1_over 1 (ln 2) = 1).
  { unfold expm1_over. rewrite Rmult_1_l, exp_ln by lra.
    destruct (Req_EM_T 1 0); lra. }
  assert (at_2 : expm1_over 2 (ln 2) = 3 / 2).
  { unfold expm1_over. replace (2 * ln 2) with (ln 2 + ln 2) by ring.
    rewrite exp_plus, exp_ln by lra. destruct (Req_EM_T 2 0); lra. }
  assert (slogs : mean slog [-1; 1] = 0).
  { unfold mean, slog, sign; simpl.
    rewrite (Rabs_left (-1)), Rabs_pos_eq by lra.
    destruct (Rle_dec 0 (-1)), (Rle_dec 0 1); try lra.
    replace (1 + - -1) with (1 + 1) by ring. field. }
  assert (halved : forall x, 0 < x -> ln (x ^ 2) / 2 = ln x).
  { intros x pos. simpl. rewrite Rmult_1_r, ln_mult by easy. field. }
  unfold nll. rewrite slogs, !variances, !up, !down.
  replace (2 - 0) with 2 by ring. replace (2 - 1) with 1 by ring.
  replace (2 - 2) with 0 by ring. rewrite at_0, at_1, at_2.
  replace (ln 2 - - (3 / 2)) with (ln 2 + 3 / 2) by ring.
  replace (3 / 2 - - ln 2) with (ln 2 + 3 / 2) by ring.
  replace ((1 - - (1)) / 2) with 1 by field.
  rewrite !halved by lra. rewrite ln_1. repeat split; try ring.
  rewrite <- ln_1. apply ln_increasing; lra.
Qed.

Lemma pair_varies : ~ constant [-1; 1].
Proof.
  intros same. specialize (same (-1) 1). simpl in same.
  assert (-1 = 1) by auto. lra.
Qed.

(** The other sign: it is not concave. *)
Theorem nll_mutant_concave : ~ forall h : list R, ~ constant h ->
  forall lambda mu w : R, 0 <= w <= 1 ->
  (1 - w) * nll h lambda + w * nll h mu
  <= nll h ((1 - w) * lambda + w * mu).
Proof.
  intros wrong. specialize (wrong _ pair_varies 0 2 (1 / 2) ltac:(lra)).
  destruct pair_values as [k [rise [pos [e0 [e1 e2]]]]].
  replace ((1 - 1 / 2) * 0 + 1 / 2 * 2) with 1 in wrong by field.
  rewrite e0, e1, e2 in wrong. lra.
Qed.

(** Without the condition on w. *)
Theorem nll_mutant_outside : ~ forall h : list R, ~ constant h ->
  forall lambda mu w : R,
  nll h ((1 - w) * lambda + w * mu)
  <= (1 - w) * nll h lambda + w * nll h mu.
Proof.
  intros wrong. specialize (wrong _ pair_varies 0 1 2).
  destruct pair_values as [k [rise [pos [e0 [e1 e2]]]]].
  replace ((1 - 2) * 0 + 2 * 1) with 2 in wrong by ring.
  rewrite e0, e1, e2 in wrong. lra.
Qed.

(** The square of a mean with a factor of 1.01: the step does not close. *)
Goal forall w p q : R, 0 <= w <= 1 ->
  101 / 100 * ((1 - w) * p + w * q) ^ 2 <= (1 - w) * p ^ 2 + w * q ^ 2.
Proof.
  intros w p q range.
  assert (0 <= w * (1 - w) * (p - q) ^ 2)
    by (apply Rmult_le_pos; [nra|apply pow2_ge_0]).
  Fail nra.
Abort.

Print Assumptions nll_convex.
Print Assumptions nll_mutant_concave.
Print Assumptions nll_mutant_outside.
